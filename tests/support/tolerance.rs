//! Reads the limits of `docs/numerics.md`, the one place where they are written.

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
#[derive(Clone, Copy, Debug)]
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

/// Returns the limit for a comparison (`reference`, `llama.cpp`, `kv rows`), a type of weights
/// (`f32`, `bf16`, `q8_0`), a model with or without experts and a cache type.
pub fn limit(against: &str, weights: &str, is_moe: bool, kv: &str) -> Limit {
    let moe = format!("{weights}-moe");
    let rows = table("limits");
    let find = |weights: &str| {
        rows.iter()
            .find(|r| r[0] == against && r[1] == weights && r[2] == kv)
            .cloned()
    };
    let row = is_moe
        .then(|| find(&moe))
        .flatten()
        .or_else(|| find(weights));
    let row = row.unwrap_or_else(|| panic!("no limit for {against}, {weights}, {kv}"));
    Limit {
        nmse: bound(&row[3]),
        median_row: bound(&row[4]),
        argmax_gap: gap(&row[5]),
        greedy_gap: gap(&row[6]),
    }
}

/// Returns llama.cpp's NMSE against the reference: cache `f32` or `f16`.
pub fn llama_figure(fixture: &str, case: &str, kv: &str) -> Option<f64> {
    let column = if kv == "f16" { 4 } else { 2 };
    let rows = table("llama.cpp figures");
    let row = rows.iter().find(|r| r[0] == fixture && r[1] == case)?;
    Some(row[column].parse().expect("a number"))
}

fn gap(cell: &str) -> f32 {
    if cell == "-" {
        f32::INFINITY
    } else {
        cell.parse().expect("a number")
    }
}

fn bound(cell: &str) -> Bound {
    match cell.strip_prefix("x ") {
        Some(times) => Bound::Times(times.parse().expect("a number")),
        None if cell == "-" => Bound::Open,
        None => Bound::Nmse(cell.parse().expect("a number")),
    }
}

/// Returns the cells of the table that follows `<!-- table: NAME -->`, without its head.
fn table(name: &str) -> Vec<Vec<String>> {
    let mark = format!("<!-- table: {name} -->\n");
    let (_, rest) = PAGE
        .split_once(&mark)
        .unwrap_or_else(|| panic!("no table {name}"));
    let rows: Vec<Vec<String>> = rest
        .lines()
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| {
            line.trim_matches('|')
                .split('|')
                .map(|c| c.trim().to_owned())
                .collect()
        })
        .collect();
    assert!(!rows.is_empty(), "table {name} is empty");
    rows
}
