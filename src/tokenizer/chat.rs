//! The chat template of a model file, rendered by minijinja.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, ErrorKind, context};
use serde::Serialize as _;

use super::error::TokenizerError;
use super::template_limits::{self, Output};
use crate::gguf::GgufFile;

const TEMPLATE: &str = "tokenizer.chat_template";
const TOKENS: &str = "tokenizer.ggml.tokens";
const BOS_ID: &str = "tokenizer.ggml.bos_token_id";
const EOS_ID: &str = "tokenizer.ggml.eos_token_id";

/// Steps a template may take: enough for any conversation, and an endless loop still ends. A fuzz
/// target runs a million templates.
const FUEL: u64 = if cfg!(fuzzing) { 50_000 } else { 50_000_000 };

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

/// A compiled chat template.
///
/// It sees what `transformers` gives one: `messages`, `add_generation_prompt`, `bos_token`,
/// `eos_token`, `raise_exception`, `strftime_now`, Python's string and dictionary methods, and
/// white-space control with trimmed blocks.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Compiles the file's template; `None` if it has none.
    ///
    /// # Errors
    /// [`TokenizerError::Template`] with the line of the fault.
    pub fn from_gguf(file: &GgufFile) -> Result<Option<Self>, TokenizerError> {
        let keys = file.metadata();
        let Some(source) = keys.opt_str(TEMPLATE)? else {
            return Ok(None);
        };
        let tokens = keys.strings(TOKENS)?.unwrap_or_default();
        let token = |key| -> Result<String, TokenizerError> {
            let id = keys.opt_u32(key)?;
            let text = id.and_then(|id| tokens.get(usize::try_from(id).ok()?));
            Ok(text.cloned().unwrap_or_default())
        };
        Self::new(source, token(BOS_ID)?, token(EOS_ID)?).map(Some)
    }

    fn new(source: &str, bos: String, eos: String) -> Result<Self, TokenizerError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        template_limits::install(&mut environment);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: &str| {
            strftime(format, seconds_since_epoch())
        });
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(TEMPLATE, source.to_owned())
            .map_err(|error| describe(&error))?;
        Ok(Self {
            environment,
            bos,
            eos,
        })
    }

    /// Renders a conversation, with the beginning of the reply if asked for.
    ///
    /// # Errors
    /// [`TokenizerError::Template`] with the line of the fault, also when the template itself
    /// refuses the conversation.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TokenizerError> {
        let values = context! {
            messages,
            add_generation_prompt,
            bos_token => self.bos,
            eos_token => self.eos,
        };
        let mut output = Output::default();
        self.environment
            .get_template(TEMPLATE)
            .and_then(|template| template.render_captured_to(values, &mut output).map(drop))
            .map_err(|error| describe(&error))?;
        // The engine writes strings only.
        Ok(String::from_utf8_lossy(&output.0).into_owned())
    }
}

/// Collects line and causes of a template fault.
fn describe(error: &minijinja::Error) -> TokenizerError {
    let mut reason = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        reason.push_str(": ");
        reason.push_str(&inner.to_string());
        cause = inner.source();
    }
    TokenizerError::Template {
        template: error.name().unwrap_or(TEMPLATE).to_owned(),
        line: error.line().unwrap_or(0),
        reason,
    }
}

fn raise_exception(message: &str) -> Result<String, minijinja::Error> {
    Err(minijinja::Error::new(
        ErrorKind::InvalidOperation,
        message.to_owned(),
    ))
}

/// `tojson` as `transformers` defines it: Python's spacing, nothing escaped for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted as `transformers` accepts it; text stays text either way.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let fail = |error: serde_json::Error| {
        minijinja::Error::new(ErrorKind::BadSerialization, error.to_string())
    };
    let mut json = Vec::new();
    if let Some(n) = indent.filter(|&n| n > 0) {
        template_limits::check("tojson: indent", n)?;
        let spaces = " ".repeat(n);
        let pretty = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
        let mut to = serde_json::Serializer::with_formatter(&mut json, pretty);
        value.serialize(&mut to).map_err(fail)?;
    } else {
        let mut to = serde_json::Serializer::with_formatter(&mut json, PythonFormatter);
        value.serialize(&mut to).map_err(fail)?;
    }
    Ok(String::from_utf8_lossy(&json).into_owned())
}

/// A space behind commas and colons, as Python's `json.dumps` has it.
#[derive(Clone, Copy, Debug)]
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }
}

fn seconds_since_epoch() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.map_or(0, |t| i64::try_from(t.as_secs()).unwrap_or(i64::MAX))
}

/// The directives that chat templates use, in UTC; others are an error, not a wrong date.
fn strftime(format: &str, seconds: i64) -> Result<String, minijinja::Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = [
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
    ];
    let days = seconds.div_euclid(86_400);
    let second = seconds.rem_euclid(86_400);
    let (year, month, day) = civil_date(days);
    let name = |names: &'static [&'static str], i: i64| -> &'static str {
        usize::try_from(i)
            .ok()
            .and_then(|i| names.get(i))
            .copied()
            .unwrap_or("")
    };
    let weekday = name(&DAYS, days.rem_euclid(7));
    let month_name = name(&MONTHS, month - 1);
    let short = |text: &'static str| text.get(..3).unwrap_or(text);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        match letters.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('H') => out.push_str(&format!("{:02}", second / 3600)),
            Some('M') => out.push_str(&format!("{:02}", second / 60 % 60)),
            Some('S') => out.push_str(&format!("{:02}", second % 60)),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(short(month_name)),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(short(weekday)),
            Some('%') => out.push('%'),
            other => {
                let directive = other.map_or(String::new(), String::from);
                return Err(minijinja::Error::new(
                    ErrorKind::InvalidOperation,
                    format!(
                        "strftime_now: expected one of %Y %m %d %H %M %S %B %b %A %a, found %{directive}"
                    ),
                ));
            }
        }
    }
    Ok(out)
}

/// Year, month and day of a day number since 1970-01-01.
///
/// # Source
/// Howard Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`.
fn civil_date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, TokenizerError> {
        let message = Message {
            role: "user".to_owned(),
            content: " Hi <b>é</b> ".to_owned(),
        };
        ChatTemplate::new(source, "<bos>".to_owned(), "<eos>".to_owned())
            .and_then(|template| template.render(&[message], true))
    }

    #[test]
    fn a_refusal_of_the_template_names_line_and_reason() {
        let source = "{% for m in messages %}\n{{ raise_exception('roles must alternate') }}\n\
                      {% endfor %}";
        let error = render(source).unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
        assert!(error.contains("roles must alternate"), "{error}");
    }

    #[test]
    fn a_syntax_fault_names_its_line() {
        let error = render("a\n{% if %}\n").unwrap_err().to_string();
        assert!(error.contains("tokenizer.chat_template"), "{error}");
        assert!(error.contains("line 2"), "{error}");
    }

    #[test]
    fn an_endless_template_ends() {
        let source = "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}\
                      {% endfor %}";
        assert!(render(source).is_err());
    }

    #[test]
    fn a_number_of_the_template_makes_no_text_or_list_of_any_length() {
        for source in [
            "{{ 'a\nb' | indent(9999999999999999999) }}",
            "{{ 'a\nb' | indent(width=200000) }}",
            "{{ [1] | tojson(indent=9999999999999999) }}",
            "{{ [1] | batch(9999999999999999, 0) | list }}",
            "{{ [1] | slice(9999999999999999) | list }}",
            "{{ '%9999999999d' | format(1) }}",
            "{{ '{:9999999999}'.format(1) }}",
            "{{ '{:.99999999999999999999f}'.format(1.5) }}",
        ] {
            let error = render(source).unwrap_err().to_string();
            assert!(error.contains("at most 100000"), "{source}: {error}");
        }
        assert_eq!(render("{{ 'a\nb' | indent(2) }}").unwrap(), "a\n  b");
        assert_eq!(render("{{ '%3d' | format(1) }}").unwrap(), "  1");
        assert_eq!(render("{{ '{:3}'.format(1) }}").unwrap(), "  1");
        assert_eq!(render("{{ [1, 2] | batch(1) | length }}").unwrap(), "2");
    }

    #[test]
    fn a_text_that_grows_without_end_is_an_error() {
        let source = "{% set x = 'a' * 90000000 %}{% for a in range(99) %}{{ x }}{% endfor %}";
        let error = render(source).unwrap_err().to_string();
        assert!(error.contains("at most 268435456 bytes"), "{error}");
    }

    #[test]
    fn python_methods_and_namespaces_work() {
        let source = "{%- set ns = namespace(n=0) -%}\n{%- for m in messages -%}\n\
            {%- set ns.n = ns.n + 1 -%}{{ m.get('role').upper() }} {{ m['content'].strip() }}\
            {{ m.get('tools') is none }}{{ 'x' if m.content.startswith(' ') else 'y' }}\
            {%- endfor -%} {{ ns.n }} {{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}";
        let text = render(source).unwrap();
        assert_eq!(text.to_lowercase(), "user hi <b>é</b>truex1 <bos><eos>true");
    }

    #[test]
    fn macros_dictsort_and_mapping_tests_work() {
        let source = "{%- macro show(d) -%}\n    {%- for k, v in d | dictsort -%}\n\
            {{ k }}={{ v }};{%- endfor -%}\n{%- endmacro -%}\n\
            {%- set d = {'b': 1, 'a': [2, 'x']} -%}\
            {{ show(d) }} {{ d is mapping }} {{ d['a'] is sequence }} {{ messages[0].content[1:3] }}";
        let text = render(source).unwrap();
        assert!(text.starts_with("a="), "{text}");
        assert!(text.contains(";b=1;"), "{text}");
        assert!(text.to_lowercase().ends_with("true true hi"), "{text}");
    }

    #[test]
    fn tojson_writes_what_python_writes() {
        let source = "{{ {'b': [1, 2.5, 'é<&'], 'a': {}, 'n': none, 't': true} | tojson }}";
        let expected = "{\"b\": [1, 2.5, \"é<&\"], \"a\": {}, \"n\": null, \"t\": true}";
        assert_eq!(render(source).unwrap(), expected);
        let source = "{{ {'b': [1]} | tojson(indent=2) }}";
        assert_eq!(render(source).unwrap(), "{\n  \"b\": [\n    1\n  ]\n}");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(strftime("%d %b %Y %%", 0).unwrap(), "01 Jan 1970 %");
        let leap = 951_782_400 + 3600 * 5 + 61;
        let text = strftime("%A %a %B %Y-%m-%d %H:%M:%S", leap).unwrap();
        assert_eq!(text, "Tuesday Tue February 2000-02-29 05:01:01");
        assert!(strftime("%Q", 0).is_err());
    }

    #[test]
    fn blocks_take_their_own_line_away() {
        assert_eq!(
            render("a\n    {% if true %}\nb\n    {% endif %}\nc").unwrap(),
            "a\nb\nc"
        );
    }
}
