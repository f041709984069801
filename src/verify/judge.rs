//! Whether what came out is what should have. Arithmetic only.

use super::is_judged_by_median;
use super::outcome::{KvRow, Outcome};
use crate::engine::Logits;
use crate::numerics::{Bound, Limit, argmax, gap, median, nmse, row_nmse};

/// How close a case must come.
#[derive(Clone, Debug, PartialEq)]
pub enum Expect {
    /// Every bit.
    Bits,
    /// Within a limit of `docs/numerics.md`.
    Within {
        /// The limit.
        limit: Limit,
        /// Its row in the table.
        name: String,
    },
}

/// A distance beside its bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Measure {
    /// What was compared.
    pub of: &'static str,
    /// NMSE; with experts that of the middle row.
    pub value: f64,
    /// The most that it may be.
    pub bound: f64,
    /// Row of the table of limits that the bound is from.
    pub name: String,
}

impl Measure {
    fn is_within(&self) -> bool {
        self.value <= self.bound
    }
}

/// What a case showed.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Every bit is equal.
    Identical,
    /// Bits differ, within the limit; this is the measure that came closest to its bound.
    Within(Measure),
    /// It is wrong.
    Wrong {
        /// What differs, and where.
        why: String,
        /// The distance, where one has a bound.
        measure: Option<Measure>,
    },
    /// There was nothing to compare.
    Skipped {
        /// Why not.
        why: String,
    },
}

impl Verdict {
    /// Whether it is wrong.
    pub fn is_wrong(&self) -> bool {
        matches!(self, Self::Wrong { .. })
    }
}

fn wrong(why: String) -> Verdict {
    Verdict::Wrong { why, measure: None }
}

/// Compares the rows that both have. A value that is not finite is always wrong, and so is a run
/// without a row in common.
pub fn judge(expect: &Expect, expected: &Outcome, found: &Outcome) -> Verdict {
    if let Some(why) = not_finite("expected", expected).or_else(|| not_finite("found", found)) {
        return wrong(why);
    }
    let pairs = pairs(&expected.logits, &found.logits);
    if pairs.is_empty() {
        return wrong("no row of logits was returned".to_owned());
    }
    let kv = kv_pairs(&expected.kv, &found.kv);
    let difference = first_difference(&pairs, &kv);
    match (difference, expect) {
        (None, _) => Verdict::Identical,
        (Some(why), Expect::Bits) => wrong(why),
        (Some(_), Expect::Within { limit, name }) => within(limit, name, &pairs, &kv),
    }
}

/// A row of logits on both sides.
struct Pair<'a> {
    row: usize,
    expected: &'a [f32],
    found: &'a [f32],
}

fn pairs<'a>(expected: &'a Logits, found: &'a Logits) -> Vec<Pair<'a>> {
    let pair = |(i, row): (usize, &usize)| {
        let j = found.rows.binary_search(row).ok()?;
        Some(Pair {
            row: *row,
            expected: expected.row(i)?,
            found: found.row(j)?,
        })
    };
    expected.rows.iter().enumerate().filter_map(pair).collect()
}

fn kv_pairs<'a>(expected: &'a [KvRow], found: &'a [KvRow]) -> Vec<(&'a KvRow, &'a KvRow)> {
    let same = |row: &'a KvRow| Some((row, found.iter().find(|other| other.is_at(row))?));
    expected.iter().filter_map(same).collect()
}

fn not_finite(side: &str, outcome: &Outcome) -> Option<String> {
    let logits = &outcome.logits;
    let at = logits.data.iter().position(|x| !x.is_finite())?;
    let n = logits.n_vocab.max(1);
    let row = logits.rows.get(at / n).copied().unwrap_or_default();
    let value = logits.data.get(at).copied().unwrap_or_default();
    Some(format!("{side} logit {} of row {row} is {value}", at % n))
}

fn first_difference(pairs: &[Pair<'_>], kv: &[(&KvRow, &KvRow)]) -> Option<String> {
    for pair in pairs {
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        let at = pair.expected.iter().zip(pair.found).position(|p| !same(p));
        if let Some(at) = at {
            let value = |row: &[f32]| row.get(at).copied().unwrap_or_default();
            return Some(format!(
                "logit {at} of row {}: expected {}, found {}",
                pair.row,
                value(pair.expected),
                value(pair.found)
            ));
        }
        if pair.expected.len() != pair.found.len() {
            return Some(format!("row {} has another length", pair.row));
        }
    }
    let (row, _) = kv.iter().find(|(a, b)| a.bytes != b.bytes)?;
    Some(format!("{row} differs"))
}

/// Distances of logits and of cache rows, and the most likely tokens.
fn within(limit: &Limit, name: &str, pairs: &[Pair<'_>], kv: &[(&KvRow, &KvRow)]) -> Verdict {
    let logits: Vec<(&[f32], &[f32])> = pairs.iter().map(|p| (p.found, p.expected)).collect();
    let rows: Vec<(Vec<f32>, Vec<f32>)> =
        kv.iter().map(|(a, b)| (b.values(), a.values())).collect();
    let rows: Vec<(&[f32], &[f32])> = rows.iter().map(|(a, b)| (&a[..], &b[..])).collect();
    let mut measures = distances("logits", limit, name, &logits);
    measures.extend(distances("K/V rows", limit, name, &rows));
    let worst = match nearest(measures, name) {
        Verdict::Within(measure) => measure,
        other => return other,
    };
    // With experts a row may be another row altogether: the median judges it.
    let is_sure = |p: &&Pair<'_>| !is_judged_by_median(limit) && gap(p.expected) > limit.argmax_gap;
    let best = |row: &[f32]| argmax(row).map_or_else(|| "none".to_owned(), |id| id.to_string());
    let other = |p: &&Pair<'_>| argmax(p.expected) != argmax(p.found);
    match pairs.iter().filter(is_sure).find(other) {
        Some(pair) => Verdict::Wrong {
            why: format!(
                "row {}: another most likely token, {} instead of {}, whose lead is {}",
                pair.row,
                best(pair.found),
                best(pair.expected),
                gap(pair.expected)
            ),
            measure: Some(worst),
        },
        None => Verdict::Within(worst),
    }
}

/// The measure that comes closest to its bound, or is furthest beyond it.
fn nearest(measures: Vec<Measure>, name: &str) -> Verdict {
    let closeness = |m: &Measure| m.value / m.bound;
    let worst = measures
        .into_iter()
        .max_by(|a, b| closeness(a).total_cmp(&closeness(b)));
    match worst {
        None => wrong(format!("there is nothing that {name} limits")),
        Some(worst) if worst.is_within() => Verdict::Within(worst),
        Some(worst) => Verdict::Wrong {
            why: format!(
                "NMSE {:.1e} of {} is above {:.1e} ({name})",
                worst.value, worst.of, worst.bound
            ),
            measure: Some(worst),
        },
    }
}

/// Judges rows of caches, pairs of found and expected.
#[cfg(feature = "llama")]
pub(super) fn judge_rows(expect: &Expect, rows: &[(Vec<f32>, Vec<f32>)]) -> Verdict {
    let rows: Vec<(&[f32], &[f32])> = rows.iter().map(|(a, b)| (&a[..], &b[..])).collect();
    match expect {
        Expect::Bits if rows.iter().all(|(a, b)| a == b) => Verdict::Identical,
        Expect::Bits => wrong("K/V rows differ".to_owned()),
        Expect::Within { limit, name } => nearest(distances("K/V rows", limit, name, &rows), name),
    }
}

/// What the limit bounds, of pairs of rows (found, expected): all together, the middle one.
fn distances(
    of: &'static str,
    limit: &Limit,
    name: &str,
    rows: &[(&[f32], &[f32])],
) -> Vec<Measure> {
    if rows.is_empty() {
        return Vec::new();
    }
    let whole = || {
        let found: Vec<f32> = rows.iter().flat_map(|r| r.0).copied().collect();
        let expected: Vec<f32> = rows.iter().flat_map(|r| r.1).copied().collect();
        nmse(&found, &expected)
    };
    let middle = || {
        let each = rows.iter().flat_map(|(a, b)| row_nmse(a, b, b.len()));
        median(&each.collect::<Vec<f64>>())
    };
    let measure = |value: f64, bound: Bound| Measure {
        of,
        value,
        bound: bound.nmse(0.0),
        name: name.to_owned(),
    };
    let mut out = Vec::new();
    if limit.nmse != Bound::Open {
        out.push(measure(whole(), limit.nmse));
    }
    if limit.median_row != Bound::Open {
        out.push(measure(middle(), limit.median_row));
    }
    out
}

#[cfg(test)]
mod tests;
