//! The profile as one page that needs nothing else: timeline, tables, roofline.
//!
//! The page's script reads two JSON objects that are embedded in it.

use serde::Serialize;

use super::report::Profile;
use super::trace::Trace;

/// The page, with a mark where the data go.
const PAGE: &str = include_str!("page.html");
/// The mark.
const MARK: &str = "/*DATA*/null";

/// Timeline in few bytes: a long prefill has a hundred thousand kernels.
#[derive(Debug, Default, Serialize)]
struct Timeline {
    /// Names of the rows.
    lanes: Vec<String>,
    /// Distinct names of stretches.
    names: Vec<String>,
    /// Distinct classes.
    classes: Vec<String>,
    /// Row, begin and length in microseconds, name, class.
    stretches: Vec<(usize, f64, f64, usize, usize)>,
}

#[derive(Debug, Serialize)]
struct Data<'a> {
    title: &'a str,
    profile: &'a Profile,
    timeline: Timeline,
}

/// Index of a text in a list, which grows when it is new.
#[derive(Default)]
struct Texts {
    list: Vec<String>,
    known: std::collections::HashMap<String, usize>,
}

impl Texts {
    fn index(&mut self, text: &str) -> usize {
        if let Some(index) = self.known.get(text) {
            return *index;
        }
        let index = self.list.len();
        self.list.push(text.to_owned());
        self.known.insert(text.to_owned(), index);
        index
    }
}

fn timeline(trace: &Trace) -> Timeline {
    let (mut lanes, mut names, mut classes) =
        (Texts::default(), Texts::default(), Texts::default());
    let named = |pid, tid| {
        let row = trace
            .events
            .iter()
            .find(|e| e.ph == "M" && e.name == "thread_name" && (e.pid, e.tid) == (pid, tid));
        let name = row.and_then(|e| e.args.get("name"));
        let name = name.and_then(|n| n.as_str()).unwrap_or("?");
        format!("{} {name}", if pid == 1 { "GPU" } else { "host" })
    };
    let mut of_row = std::collections::HashMap::new();
    let mut stretches = Vec::new();
    for event in trace.events.iter().filter(|e| e.ph == "X") {
        let lane = of_row
            .entry((event.pid, event.tid))
            .or_insert_with(|| named(event.pid, event.tid));
        stretches.push((
            lanes.index(lane),
            event.ts,
            event.dur,
            names.index(&event.name),
            classes.index(&event.cat),
        ));
    }
    Timeline {
        lanes: lanes.list,
        names: names.list,
        classes: classes.list,
        stretches,
    }
}

/// The page of a profile.
///
/// # Errors
/// Numbers that JSON cannot hold.
pub fn page(title: &str, profile: &Profile, trace: &Trace) -> Result<String, serde_json::Error> {
    let data = serde_json::to_string(&Data {
        title,
        profile,
        timeline: timeline(trace),
    })?;
    // Inside a script element nothing may look like its end.
    Ok(PAGE.replace(
        MARK,
        &data.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
    ))
}
