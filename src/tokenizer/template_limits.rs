//! What a template may ask for: the template engine's filters and methods that make text or lists
//! as long as a number says, behind a limit, and an end to what it writes.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Rest, StringInput, Value};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Most columns, elements or spaces: what minijinja allows a `range`.
const MOST: usize = 100_000;
/// Most bytes of a rendered conversation.
const MOST_BYTES: usize = 1 << 28;

/// Puts the limits in the place of what they limit.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_filter("indent", indent);
    environment.add_filter("batch", batch);
    environment.add_filter("slice", slice);
    environment.add_filter("format", format);
    environment.set_unknown_method_callback(method);
}

/// Refuses a number above the limit.
pub(super) fn check(what: &str, found: usize) -> Result<(), Error> {
    if found <= MOST {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidOperation,
        format!("{what}: expected at most {MOST}, found {found}"),
    ))
}

fn indent(
    value: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let named: Option<usize> = options.peek("width")?;
    check("indent", width.or(named).unwrap_or(0))?;
    filters::indent(value, width, first, blank, options)
}

fn batch(state: &State, list: Value, n: usize, fill: Option<Value>) -> Result<Value, Error> {
    check("batch", n)?;
    filters::batch(state, list, n, fill)
}

fn slice(state: &State, list: Value, n: usize, fill: Option<Value>) -> Result<Value, Error> {
    check("slice", n)?;
    filters::slice(state, list, n, fill)
}

fn format(state: &State, form: &Value, values: Rest<Value>) -> Result<Value, Error> {
    check_widths(form)?;
    filters::format(state, form, values)
}

/// Python's methods of strings and dictionaries.
fn method(state: &State, on: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if name == "format" {
        check_widths(on)?;
    }
    unknown_method_callback(state, on, name, args)
}

/// Looks at every number of a format: widths, precisions and, never as large, places.
fn check_widths(form: &Value) -> Result<(), Error> {
    let text = form.as_str().unwrap_or_default();
    let numbers = text.split(|c: char| !c.is_ascii_digit());
    for digits in numbers.filter(|digits| !digits.is_empty()) {
        check("format", digits.parse().unwrap_or(usize::MAX))?;
    }
    Ok(())
}

/// Collects what a template writes, up to [`MOST_BYTES`].
#[derive(Debug, Default)]
pub(super) struct Output(pub(super) Vec<u8>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MOST_BYTES {
            return Err(io::Error::other(format!(
                "expected a text of at most {MOST_BYTES} bytes, found more"
            )));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
