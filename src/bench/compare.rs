//! Two result files against a bar that was written down before: a verdict for each point.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{BenchError, Ratio, Result, Summary};

/// Settings of a side that make it another task; the others are means to the same end, and may be
/// what is compared.
const TASK_SETTINGS: [&str; 2] = ["device", "kv_type"];

/// The part of a result file that a comparison reads.
#[derive(Clone, Debug, Deserialize)]
pub struct Stored {
    points: Vec<StoredPoint>,
    models: Vec<StoredModel>,
    method: StoredMethod,
    machine: StoredMachine,
}

#[derive(Clone, Debug, Deserialize)]
struct StoredModel {
    label: String,
    fingerprint: String,
}

#[derive(Clone, Debug, Deserialize)]
struct StoredMethod {
    seed: u64,
    bar_percent: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct StoredMachine {
    device: StoredDevice,
    gpu: Option<StoredGpu>,
    cpu: Option<String>,
    n_cores: usize,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct StoredDevice {
    description: String,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct StoredGpu {
    name: String,
    driver: String,
}

#[derive(Clone, Debug, Deserialize)]
struct StoredPoint {
    #[serde(flatten)]
    key: Key,
    valid: bool,
    ours: StoredSide,
    noise: Option<Ratio>,
}

/// What two points must have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Label of the model.
    pub label: String,
    /// `prefill`, `chunk` or `decode`.
    pub kind: String,
    /// Prompt tokens in the timed region.
    pub n_prompt: usize,
    /// Tokens fed one by one.
    pub n_gen: usize,
    /// Tokens in front.
    pub start_pos: usize,
}

#[derive(Clone, Debug, Deserialize)]
struct StoredSide {
    time_us: Option<Summary>,
    settings: BTreeMap<String, String>,
}

/// What a comparison says of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Faster by more than the bar.
    Better,
    /// Slower by more than the bar.
    Worse,
    /// Neither, or not beyond the spread and the noise.
    NoDifference,
    /// Not the same task, or an answer was wrong.
    NotComparable,
}

/// One point of both files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The point.
    #[serde(flatten)]
    pub key: Key,
    /// The verdict.
    pub outcome: Outcome,
    /// How much faster the second file is, in percent of the first; null when not comparable.
    pub change_percent: Option<f64>,
    /// Why, in words.
    pub why: String,
}

/// The whole comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The bar, in percent.
    pub bar_percent: f64,
    /// The points of the first file, then those that only the second has.
    pub points: Vec<Compared>,
}

/// A bar such as `1.5%`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar(pub f64);

impl std::str::FromStr for Bar {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').and_then(|n| n.trim().parse().ok());
        match number {
            Some(percent) if (0.0..=100.0).contains(&percent) => Ok(Self(percent)),
            _ => Err("expected a percentage such as 1.5%".to_owned()),
        }
    }
}

impl Stored {
    /// Reads a result file.
    ///
    /// # Errors
    /// [`BenchError::Io`], [`BenchError::ResultFile`].
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|source| BenchError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        let bad = |found: String| BenchError::ResultFile {
            path: PathBuf::from(path),
            expected: "a result of bench --json, schema version 1",
            found,
        };
        let value: serde_json::Value =
            serde_json::from_slice(text).map_err(|e| bad(e.to_string()))?;
        let version = value.get("schema_version").and_then(|v| v.as_u64());
        if version != Some(1) {
            return Err(bad(match version {
                Some(version) => format!("schema version {version}"),
                None => "no schema version".to_owned(),
            }));
        }
        serde_json::from_value(value).map_err(|e| bad(e.to_string()))
    }

    /// The bar that was written down when it was measured, in percent.
    pub fn bar_percent(&self) -> Option<f64> {
        self.method.bar_percent
    }

    fn fingerprint(&self, label: &str) -> Option<&str> {
        let model = self.models.iter().find(|m| m.label == label)?;
        Some(&model.fingerprint)
    }
}

/// Compares the second file with the first.
pub fn compare(old: &Stored, new: &Stored, bar: Bar) -> Comparison {
    let find = |file: &'_ Stored, key: &Key| file.points.iter().find(|p| p.key == *key).cloned();
    let missing = |key: &Key, which: &str| Compared {
        key: key.clone(),
        outcome: Outcome::NotComparable,
        change_percent: None,
        why: format!("the {which} file does not have it"),
    };
    let mut points: Vec<Compared> = old
        .points
        .iter()
        .map(|a| match find(new, &a.key) {
            Some(b) => point(old, new, a, &b, bar),
            None => missing(&a.key, "second"),
        })
        .collect();
    let only_new = new.points.iter().filter(|b| find(old, &b.key).is_none());
    points.extend(only_new.map(|b| missing(&b.key, "first")));
    Comparison {
        bar_percent: bar.0,
        points,
    }
}

impl Comparison {
    /// Whether nothing is worse and everything could be compared.
    pub fn is_passed(&self) -> bool {
        let fails = [Outcome::Worse, Outcome::NotComparable];
        !self.points.is_empty() && self.points.iter().all(|p| !fails.contains(&p.outcome))
    }

    /// For people.
    pub fn describe(&self) -> String {
        let mut text = format!("bar {} %\n", self.bar_percent);
        for point in &self.points {
            let key = &point.key;
            let n = key.n_prompt.max(key.n_gen);
            let change = point
                .change_percent
                .map_or_else(|| "-".to_owned(), |c| format!("{c:+.1} %"));
            let outcome = match point.outcome {
                Outcome::Better => "better",
                Outcome::Worse => "WORSE",
                Outcome::NoDifference => "no difference",
                Outcome::NotComparable => "NOT COMPARABLE",
            };
            text += &format!(
                "{} {} {n} at {}: {outcome}, {change}: {}\n",
                key.label, key.kind, key.start_pos, point.why
            );
        }
        text
    }
}

/// Why two points are different tasks.
fn difference(old: &Stored, new: &Stored, a: &StoredPoint, b: &StoredPoint) -> Option<String> {
    if old.machine != new.machine {
        return Some("the machines differ".to_owned());
    }
    if old.fingerprint(&a.key.label) != new.fingerprint(&b.key.label) {
        return Some("the model files differ".to_owned());
    }
    if old.method.seed != new.method.seed {
        return Some(format!(
            "the seeds differ: {} and {}",
            old.method.seed, new.method.seed
        ));
    }
    for name in TASK_SETTINGS {
        let (x, y) = (a.ours.settings.get(name), b.ours.settings.get(name));
        if x != y {
            let shown = |v: Option<&String>| v.map_or("none", String::as_str).to_owned();
            return Some(format!("{name} differs: {} and {}", shown(x), shown(y)));
        }
    }
    if !a.valid || !b.valid {
        return Some("an answer was wrong".to_owned());
    }
    None
}

fn point(old: &Stored, new: &Stored, a: &StoredPoint, b: &StoredPoint, bar: Bar) -> Compared {
    let say = |outcome, change_percent, why| Compared {
        key: a.key.clone(),
        outcome,
        change_percent,
        why,
    };
    if let Some(why) = difference(old, new, a, b) {
        return say(Outcome::NotComparable, None, why);
    }
    let (Some(before), Some(after)) = (a.ours.time_us, b.ours.time_us) else {
        return say(Outcome::NotComparable, None, "no samples".to_owned());
    };
    let change = (before.median / after.median - 1.0) * 100.0;
    let noise = |p: &StoredPoint| p.noise.map_or(0.0, |n| n.distance_from_one() * 100.0);
    let noise = noise(a).max(noise(b));
    if change.abs() <= bar.0 {
        return say(
            Outcome::NoDifference,
            Some(change),
            "within the bar".to_owned(),
        );
    }
    if before.overlaps(&after) {
        let why = "the spreads overlap".to_owned();
        return say(Outcome::NoDifference, Some(change), why);
    }
    if change.abs() <= noise {
        let why = format!("within the noise of {noise:.1} %");
        return say(Outcome::NoDifference, Some(change), why);
    }
    let outcome = if change > 0.0 {
        Outcome::Better
    } else {
        Outcome::Worse
    };
    say(outcome, Some(change), "beyond the bar".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A result of one point with this median, in microseconds, and this half range.
    fn result(median: f64, half: f64) -> Value {
        json!({
            "schema_version": 1,
            "points": [{
                "label": "m", "kind": "prefill", "n_prompt": 512, "n_gen": 0, "start_pos": 0,
                "valid": true,
                "ours": {
                    "time_us": {
                        "n": 9, "median": median, "q1": median - half, "q3": median + half,
                        "mad": half, "min": median - half, "max": median + half,
                    },
                    "settings": { "kv_type": "f16", "chunk": "2048" },
                },
                "noise": { "median": 1.0, "low": 0.999, "high": 1.001, "n": 9 },
            }],
            "models": [{ "label": "m", "fingerprint": "ab" }],
            "method": { "seed": 1, "bar_percent": null },
            "machine": {
                "device": { "description": "a GPU" }, "gpu": null, "cpu": "c", "n_cores": 2,
            },
        })
    }

    fn stored(value: &Value) -> Stored {
        Stored::parse(Path::new("r.json"), value.to_string().as_bytes()).unwrap()
    }

    fn outcome(a: &Value, b: &Value) -> (Outcome, String, bool) {
        let comparison = compare(&stored(a), &stored(b), Bar(1.5));
        let point = &comparison.points[0];
        (point.outcome, point.why.clone(), comparison.is_passed())
    }

    #[test]
    fn faster_beyond_the_bar_is_better_and_slower_is_worse() {
        let (a, b) = (result(1000.0, 2.0), result(900.0, 2.0));

        assert_eq!(outcome(&a, &b).0, Outcome::Better);
        assert_eq!(
            (outcome(&b, &a).0, outcome(&b, &a).2),
            (Outcome::Worse, false)
        );
        assert_eq!(outcome(&a, &result(990.0, 1.0)).0, Outcome::NoDifference);
        assert!(outcome(&a, &a).2);
    }

    #[test]
    fn overlap_and_noise_are_no_difference_though_beyond_the_bar() {
        let (a, b) = (result(1000.0, 60.0), result(900.0, 60.0));
        assert_eq!(outcome(&a, &b).1, "the spreads overlap");

        let mut noisy = result(900.0, 2.0);
        noisy["points"][0]["noise"]["high"] = json!(1.2);
        let (verdict, why, _) = outcome(&result(1000.0, 2.0), &noisy);
        assert_eq!(verdict, Outcome::NoDifference);
        assert!(why.contains("noise of 20.0 %"), "{why}");
    }

    #[test]
    fn other_machine_model_seed_or_cache_type_is_not_comparable() {
        let a = result(1000.0, 2.0);
        let changed = |pointer: &str, value: Value| {
            let mut b = result(900.0, 2.0);
            *b.pointer_mut(pointer).unwrap() = value;
            outcome(&a, &b)
        };
        for (pointer, value, word) in [
            ("/machine/device/description", json!("other"), "machines"),
            ("/models/0/fingerprint", json!("cd"), "model files"),
            ("/method/seed", json!(2), "seeds"),
            ("/points/0/ours/settings/kv_type", json!("f32"), "kv_type"),
            ("/points/0/valid", json!(false), "wrong"),
        ] {
            let (verdict, why, passed) = changed(pointer, value);
            assert_eq!((verdict, passed), (Outcome::NotComparable, false));
            assert!(why.contains(word), "{why}");
        }
        let chunk = changed("/points/0/ours/settings/chunk", json!("4096"));
        assert_eq!(chunk.0, Outcome::Better);
    }

    #[test]
    fn a_point_in_one_file_only_is_not_comparable() {
        let (a, mut b) = (result(1000.0, 2.0), result(900.0, 2.0));
        b["points"][0]["n_prompt"] = json!(2048);

        let comparison = compare(&stored(&a), &stored(&b), Bar(1.5));

        let found: Vec<_> = comparison.points.iter().map(|p| p.outcome).collect();
        assert_eq!(found, [Outcome::NotComparable; 2]);
        assert!(comparison.points[1].why.contains("first file"));
    }

    #[test]
    fn foreign_files_are_refused_with_what_was_found() {
        for (text, found) in [
            ("{}", "no schema version"),
            ("{\"schema_version\":2}", "schema version 2"),
            ("{\"schema_version\":1}", "missing field"),
            ("x", "expected value"),
        ] {
            let error = Stored::parse(Path::new("r.json"), text.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(found), "{error}");
        }
    }

    #[test]
    fn a_bar_is_a_percentage_with_its_sign() {
        assert_eq!("1.5%".parse(), Ok(Bar(1.5)));
        for wrong in ["1.5", "%", "-1%", "101%", "NaN%"] {
            assert!(wrong.parse::<Bar>().is_err(), "{wrong}");
        }
    }
}
