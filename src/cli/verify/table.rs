//! The table of verdicts, for people and as JSON.

use std::time::Duration;

use serde::Serialize;

use crate::cli::report::{count, to_us};
use crate::verify::{Measure, Verdict};

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Identical,
    Within,
    Wrong,
    Skipped,
}

/// One check.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    name: String,
    result: Answer,
    of: Option<&'static str>,
    nmse: Option<f64>,
    bound: Option<f64>,
    bound_name: Option<String>,
    why: Option<String>,
    time_us: u64,
}

impl Row {
    /// A verdict, and how long it took.
    pub fn new(name: &str, verdict: Verdict, duration: Duration) -> Self {
        let (result, measure, why) = match verdict {
            Verdict::Identical => (Answer::Identical, None, None),
            Verdict::Within(measure) => (Answer::Within, Some(measure), None),
            Verdict::Wrong { why, measure } => (Answer::Wrong, measure, Some(why)),
            Verdict::Skipped { why } => (Answer::Skipped, None, Some(why)),
        };
        let number = |of: fn(&Measure) -> f64| measure.as_ref().map(of);
        Self {
            name: name.to_owned(),
            result,
            of: measure.as_ref().map(|m| m.of),
            nmse: number(|m| m.value).filter(|value| value.is_finite()),
            bound: number(|m| m.bound),
            bound_name: measure.map(|m| m.name),
            why,
            time_us: to_us(duration),
        }
    }

    pub fn is_wrong(&self) -> bool {
        self.result == Answer::Wrong
    }

    /// What differs, or why there was nothing to compare.
    pub fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// A line of the table.
    pub fn describe(&self) -> String {
        let word = match self.result {
            Answer::Identical => "bit-identical",
            Answer::Within => "within bound",
            Answer::Wrong => "WRONG",
            Answer::Skipped => "skipped",
        };
        let mut line = format!("{:<26}{word:<15}", self.name);
        match (&self.why, self.nmse, self.bound, self.of, &self.bound_name) {
            (Some(why), ..) => line += why,
            (None, Some(nmse), Some(bound), Some(of), Some(name)) => {
                line += &format!("{nmse:.1e} of {bound:.1e}  {of}; {name}");
            }
            _ => {}
        }
        line.trim_end().to_owned() + "\n"
    }
}

/// All checks.
#[derive(Debug, Serialize)]
pub(super) struct Table {
    is_passed: bool,
    n_identical: usize,
    n_within: usize,
    n_wrong: usize,
    n_skipped: usize,
    checks: Vec<Row>,
}

impl Table {
    pub fn new(checks: Vec<Row>) -> Self {
        let n = |result| checks.iter().filter(|row| row.result == result).count();
        Self {
            is_passed: n(Answer::Wrong) == 0,
            n_identical: n(Answer::Identical),
            n_within: n(Answer::Within),
            n_wrong: n(Answer::Wrong),
            n_skipped: n(Answer::Skipped),
            checks,
        }
    }

    /// The table for people, and the sum below it.
    pub fn describe(&self) -> String {
        let mut text: String = self.checks.iter().map(Row::describe).collect();
        text += &format!(
            "\n{}: {} bit-identical, {} within bounds, {} wrong, {} skipped\n",
            count(self.checks.len(), "check"),
            self.n_identical,
            self.n_within,
            self.n_wrong,
            self.n_skipped
        );
        text
    }

    /// The process's answer: yes (0) when nothing is wrong, else no (1).
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.is_passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(verdicts: Vec<(&str, Verdict)>) -> Table {
        let row = |(name, verdict)| Row::new(name, verdict, Duration::from_micros(7));
        Table::new(verdicts.into_iter().map(row).collect())
    }

    fn measure(value: f64) -> Measure {
        Measure {
            of: "logits",
            value,
            bound: 4.4e-3,
            name: "own, q8_0, K/V f16".to_owned(),
        }
    }

    #[test]
    fn a_wrong_check_is_no_and_is_named_with_what_differs() {
        let table = table(vec![
            ("repeat", Verdict::Identical),
            (
                "switch ple",
                Verdict::Wrong {
                    why: "logit 2 of row 5: expected 3, found 4".to_owned(),
                    measure: None,
                },
            ),
        ]);

        assert_eq!(table.exit_code(), 1);
        let text = table.describe();
        let line = text.lines().find(|l| l.starts_with("switch ple ")).unwrap();
        assert!(line.contains(" WRONG ") && line.ends_with("row 5: expected 3, found 4"));
        assert!(text.ends_with("2 checks: 1 bit-identical, 0 within bounds, 1 wrong, 0 skipped\n"));
    }

    #[test]
    fn identical_within_and_skipped_are_yes() {
        let skipped = Verdict::Skipped {
            why: "no room".to_owned(),
        };
        let table = table(vec![
            ("repeat", Verdict::Identical),
            ("chunk 32", Verdict::Within(measure(1.2e-5))),
            ("weights bf16", skipped),
        ]);

        assert_eq!(table.exit_code(), 0);
        let text = table.describe();
        assert!(
            text.contains("1.2e-5 of 4.4e-3  logits; own, q8_0, K/V f16\n"),
            "{text}"
        );
        assert!(text.contains("skipped        no room\n"), "{text}");
    }

    #[test]
    fn json_has_numbers_where_there_are_some_and_no_infinity() {
        let table = table(vec![
            ("chunk 32", Verdict::Within(measure(1.5e-5))),
            (
                "chunk 16",
                Verdict::Wrong {
                    why: "far".to_owned(),
                    measure: Some(measure(f64::INFINITY)),
                },
            ),
        ]);

        let json = serde_json::to_value(&table).unwrap();

        assert_eq!(json["is_passed"], false);
        assert_eq!(
            (&json["n_within"], &json["n_wrong"]),
            (&1.into(), &1.into())
        );
        let check = &json["checks"][0];
        assert_eq!(
            (&check["result"], &check["nmse"]),
            (&"within".into(), &1.5e-5.into())
        );
        assert_eq!((&check["time_us"], &check["why"]), (&7.into(), &().into()));
        assert_eq!(json["checks"][1]["result"], "wrong");
        assert!(json["checks"][1]["nmse"].is_null());
    }
}
