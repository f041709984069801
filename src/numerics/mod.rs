//! How far two results may be apart: the limits of `docs/numerics.md`, the one place where they are
//! written, and the measures that they limit. Tests, `bench` and `verify` read them here.
#![forbid(unsafe_code)]

mod measure;

pub use measure::{argmax, gap, kl, max_abs, median, nmse, row_nmse};

use crate::gguf::DType;

const PAGE: &str = include_str!("../../docs/numerics.md");

/// How large a difference may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// At most this NMSE.
    Nmse(f64),
    /// At most this many times llama.cpp's own figure.
    Times(f64),
    /// Not judged.
    Open,
}

impl Bound {
    /// The bound as an NMSE, `figure` being llama.cpp's own.
    pub fn nmse(self, figure: f64) -> f64 {
        match self {
            Self::Nmse(limit) => limit,
            Self::Times(n) => n * figure,
            Self::Open => f64::INFINITY,
        }
    }
}

/// A row of the limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// NMSE of all compared rows together.
    pub nmse: Bound,
    /// NMSE of the middle row.
    pub median_row: Bound,
    /// An argmax may differ where the lead is below this.
    pub argmax_gap: f32,
    /// A greedy run ends at the first step whose lead is below this.
    pub greedy_gap: f32,
}

/// What rounds the activations of a model: coarser is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rounding {
    /// Products in float32.
    F32,
    /// Operands of products in BF16 or F16.
    Bf16,
    /// Operands of products in blocks of 8 bits: every quantised type.
    Q8,
}

impl Rounding {
    /// What matrices, or caches, of a type do to what is multiplied with them.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 | DType::BF16 => Self::Bf16,
            _ => Self::Q8,
        }
    }

    /// Its name in the table of limits.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Q8 => "q8_0",
        }
    }
}

/// Returns the limit for a comparison (`reference`, `llama.cpp`, `kv rows`, `own`, `gpu`), a type of weights (`f32`, `bf16`, `q8_0`), a model with or without experts and a cache
/// type; `None` where the page has none.
pub fn limit(against: &str, weights: &str, is_moe: bool, kv: &str) -> Option<Limit> {
    let moe = format!("{weights}-moe");
    let rows = table("limits");
    let find = |weights: &str| {
        rows.iter()
            .find(|r| cell(r, 0) == against && cell(r, 1) == weights && cell(r, 2) == kv)
    };
    let row = is_moe
        .then(|| find(&moe))
        .flatten()
        .or_else(|| find(weights))?;
    Some(Limit {
        nmse: bound(cell(row, 3))?,
        median_row: bound(cell(row, 4))?,
        argmax_gap: gap_of(cell(row, 5))?,
        greedy_gap: gap_of(cell(row, 6))?,
    })
}

/// Returns llama.cpp's NMSE against the reference: cache `f32` or `f16`.
pub fn llama_figure(fixture: &str, case: &str, kv: &str) -> Option<f64> {
    let column = if kv == "f16" { 4 } else { 2 };
    let rows = table("llama.cpp figures");
    let row = rows
        .iter()
        .find(|r| cell(r, 0) == fixture && cell(r, 1) == case)?;
    cell(row, column).parse().ok()
}

/// Returns the bound with this id of the engine's own tests; the first where it has several.
pub fn own_bound(id: &str) -> Option<f64> {
    let (_, rest) = PAGE.split_once("```csv\n")?;
    let line = rest
        .lines()
        .take_while(|line| *line != "```")
        .find(|line| line.split(',').next() == Some(id))?;
    line.split(',').nth(4)?.split(' ').next()?.parse().ok()
}

fn gap_of(cell: &str) -> Option<f32> {
    if cell == "-" {
        Some(f32::INFINITY)
    } else {
        cell.parse().ok()
    }
}

fn bound(cell: &str) -> Option<Bound> {
    match cell.strip_prefix("x ") {
        Some(times) => times.parse().ok().map(Bound::Times),
        None if cell == "-" => Some(Bound::Open),
        None => cell.parse().ok().map(Bound::Nmse),
    }
}

fn cell<'r>(row: &[&'r str], i: usize) -> &'r str {
    row.get(i).copied().unwrap_or_default()
}

/// Returns the cells of the table that follows `<!-- table: NAME -->`, without its head; nothing
/// where there is none.
fn table(name: &str) -> Vec<Vec<&'static str>> {
    let mark = format!("<!-- table: {name} -->\n");
    let rest = PAGE.split_once(&mark).map_or("", |(_, rest)| rest);
    rest.lines()
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_limits_reads_and_is_found_by_its_names() {
        let rows = table("limits");
        assert!(rows.len() >= 31, "{}", rows.len());
        for row in rows {
            let (weights, is_moe) = match row[1].strip_suffix("-moe") {
                Some(weights) => (weights, true),
                None => (row[1], false),
            };

            let limit = limit(row[0], weights, is_moe, row[2]).unwrap_or_else(|| panic!("{row:?}"));

            let is_open = limit.nmse == Bound::Open && limit.median_row == Bound::Open;
            assert!(!is_open, "{row:?} limits nothing");
        }
    }

    #[test]
    fn what_the_page_does_not_limit_is_none() {
        assert_eq!(limit("nobody", "f32", false, "f32"), None);
        assert_eq!(limit("llama.cpp", "f32", false, "q8_0"), None);
        assert_eq!(llama_figure("a-e4b-f32", "len0", "f32"), None);
        assert_eq!(own_bound("chunk"), None);
    }

    #[test]
    fn every_bound_of_the_own_tests_is_a_number_and_its_id_is_unique() {
        let (_, rest) = PAGE.split_once("```csv\n").unwrap();
        let lines = rest.lines().skip(1).take_while(|line| *line != "```");
        let mut ids: Vec<&str> = lines.map(|line| line.split(',').next().unwrap()).collect();
        assert!(ids.iter().all(|id| own_bound(id).is_some()));
        let n = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), n);
    }

    #[test]
    fn every_combination_that_verify_asks_for_has_a_limit() {
        for against in ["own", "gpu", "llama.cpp", "kv rows"] {
            for rounding in [Rounding::F32, Rounding::Bf16, Rounding::Q8] {
                for is_moe in [false, true] {
                    for kv in ["f32", "f16"] {
                        let limit = limit(against, rounding.name(), is_moe, kv);
                        assert!(limit.is_some(), "{against} {rounding:?} {is_moe} {kv}");
                    }
                }
            }
        }
    }

    #[test]
    fn coarser_rounding_is_greater() {
        assert!(Rounding::of(DType::F32) < Rounding::of(DType::F16));
        assert_eq!(Rounding::of(DType::F16), Rounding::of(DType::BF16));
        assert!(Rounding::of(DType::BF16) < Rounding::of(DType::Q4_K));
        assert_eq!(Rounding::of(DType::Q8_0).name(), "q8_0");
    }
}
