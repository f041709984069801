//! The result as a table for a terminal, and as Markdown.

use super::report::{MemoryReport, PointReport, RatioReport};
use super::{Accuracy, Report, Summary};

/// Heads of the columns.
const HEADS: [&str; 9] = [
    "model",
    "tokens",
    "ours tok/s",
    "peer tok/s",
    "ratio",
    "noise",
    "replayed",
    "peak memory",
    "check",
];

/// The result as aligned columns.
pub fn table(report: &Report) -> String {
    let rows = rows(report);
    let mut widths = HEADS.map(str::len);
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let padded: Vec<String> = cells
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        padded.join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(HEADS.to_vec());
    for row in &rows {
        text += &line(row.iter().map(String::as_str).collect());
    }
    text + "\n" + &notes(report)
}

/// The result as a Markdown page.
pub fn markdown(report: &Report) -> String {
    let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = row(&HEADS.map(str::to_owned)) + &row(&HEADS.map(|_| "---".to_owned()));
    for cells in rows(report) {
        text += &row(&cells);
    }
    let command = report.method.command.join(" ");
    text + &format!("\nCommand: `{command}`\n\n```text\n{}```\n", notes(report))
}

/// A point in one line, for progress.
pub fn one_line(point: &PointReport) -> String {
    let cells = row(point);
    let named: Vec<String> = HEADS
        .iter()
        .zip(&cells)
        .skip(2)
        .map(|(head, cell)| format!("{head} {cell}"))
        .collect();
    format!("{} {}: {}", point.label, point.what(), named.join("; "))
}

/// One row of cells for each point.
pub(super) fn rows(report: &Report) -> Vec<[String; 9]> {
    report.points.iter().map(row).collect()
}

fn row(point: &PointReport) -> [String; 9] {
    let n = if point.kind == "decode" {
        point.n_gen
    } else {
        point.n_prompt
    };
    [
        point.label.clone(),
        point.what(),
        speed(point.ours.time_us, n, point.valid),
        point
            .peer
            .as_ref()
            .map_or("-".to_owned(), |p| speed(p.time_us, n, point.valid)),
        ratio(&point.ratio),
        point.noise.map_or("-".to_owned(), |noise| {
            format!("{:.1} %", noise.distance_from_one() * 100.0)
        }),
        match point.replayed {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "n/a",
        }
        .to_owned(),
        point.memory.map_or("-".to_owned(), memory),
        check(point),
    ]
}

/// `53750 (53601 to 53899)`: median and quartiles.
fn speed(time: Option<Summary>, n: usize, valid: bool) -> String {
    let Some(time) = time.filter(|_| valid) else {
        return if valid { "-" } else { "INVALID" }.to_owned();
    };
    let tok_s = |us: f64| {
        let speed = n as f64 / us * 1e6;
        let digits = usize::from(speed < 1000.0);
        format!("{speed:.digits$}")
    };
    format!(
        "{} ({} to {})",
        tok_s(time.median),
        tok_s(time.q3),
        tok_s(time.q1)
    )
}

fn ratio(ratio: &RatioReport) -> String {
    match (ratio.median, ratio.low, ratio.high) {
        (Some(median), Some(low), Some(high)) => format!("{median:.2} ({low:.2} to {high:.2})"),
        _ if ratio.refused.as_deref() == Some("no peer") => "-".to_owned(),
        _ => "refused".to_owned(),
    }
}

fn memory(memory: MemoryReport) -> String {
    format!(
        "{:.2} GiB ({:+.1} %)",
        memory.peak as f64 / f64::from(1 << 30),
        memory.difference_percent
    )
}

fn check(point: &PointReport) -> String {
    match (point.valid, point.check) {
        (false, _) => "INVALID".to_owned(),
        (true, Some(check)) => format!(
            "NMSE {:.1e}, argmax {}",
            check.nmse,
            if check.argmax_equal { "=" } else { "~" }
        ),
        (true, None) => "repeats".to_owned(),
    }
}

/// What the table does not say: method, machine, settings, refusals, warnings.
pub(super) fn notes(report: &Report) -> String {
    let method = &report.method;
    let mut text = format!(
        "timed      {}\norder      {}\nspread     {}\nmachine    {}\n",
        method.timed_region,
        method.order,
        method.spread,
        report.machine.describe()
    );
    for model in &report.models {
        for sweep in &model.peer_sweep {
            text += &format!(
                "sweep      {}: llama.cpp {}: {:.0} tok/s at {}\n",
                model.label,
                sweep.setting(),
                sweep.tok_s,
                sweep.n_prompt
            );
        }
    }
    let mut seen = Vec::new();
    for side in report
        .points
        .iter()
        .flat_map(|p| [Some(&p.ours), p.peer.as_ref()])
        .flatten()
    {
        let settings: Vec<String> = side
            .settings
            .iter()
            .map(|(key, value)| format!("{key} {value}"))
            .collect();
        let line = format!("settings   {}: {}\n", side.name, settings.join(", "));
        if !seen.contains(&line) {
            text += &line;
            seen.push(line);
        }
    }
    for point in &report.points {
        let name = format!("{} {}", point.label, point.what());
        if let Some(why) = &point.why_invalid {
            text += &format!("INVALID    {name}: {why}\n");
        }
        if let Some(why) = point.ratio.refused.as_ref().filter(|why| *why != "no peer") {
            text += &format!("refused    {name}: {why}\n");
        }
        if !point.is_complete {
            text += &format!("stopped    {name}: {} rounds\n", point.again_us.len());
        }
        for warning in &point.warnings {
            text += &format!("warning    {name}: {warning}\n");
        }
        text += &format!("cold       {name}: {}\n", cold(point));
    }
    report
        .accuracy
        .iter()
        .fold(text, |text, a| text + &accuracy(a))
}

/// Divergence of both sides.
fn accuracy(accuracy: &Accuracy) -> String {
    let Accuracy {
        label, n_positions, ..
    } = accuracy;
    let mut text = format!(
        "accuracy   {label}: KL divergence to float32 over {n_positions} positions, in nats\n\
         reference  {label}: {}\n",
        accuracy.reference
    );
    for side in &accuracy.sides {
        text += &format!(
            "accuracy   {label}: {}: mean {:.3e}, median {:.3e}, largest {:.3e}, \
             same argmax {:.2} %\n",
            side.name,
            side.mean_kl,
            side.median_kl,
            side.max_kl,
            side.argmax_equal * 100.0
        );
    }
    if let (Some(excess), Some(error), Some(is_above)) = (
        accuracy.excess,
        accuracy.excess_standard_error,
        accuracy.is_above,
    ) {
        text += &format!(
            "accuracy   {label}: ours minus the peer's {excess:+.2e}, standard error {error:.1e}: {}\n",
            if is_above { "ABOVE" } else { "not above" }
        );
    }
    text
}

/// First runs of both sides.
fn cold(point: &PointReport) -> String {
    let one = |name: &str, us: u64| format!("{name} {:.1} ms", us as f64 / 1e3);
    let mut text = one(&point.ours.name, point.ours.cold_us);
    if let Some(peer) = &point.peer {
        text += &format!(", {}", one(&peer.name, peer.cold_us));
    }
    text
}
