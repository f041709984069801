//! A profile as text for a terminal.

use std::fmt::Write as _;

use super::idle::{Cause, Gap};
use super::report::{Method, Profile, WorkRow};
use super::window::{Copies, Usage};

/// Kernels that the text lists.
const N_KERNELS: usize = 30;
/// Gaps that the text lists.
const N_GAPS: usize = 10;

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// The whole profile.
pub fn text(profile: &Profile) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "wall         {:>10.3} ms", ms(profile.wall_ns));
    match &profile.usage {
        Some(usage) => out += &usage_text(profile, usage),
        None => {
            let _ = writeln!(
                out,
                "nodes        {:>10.3} ms  {:.2} of the wall: each node run alone, with its start and wait",
                ms(profile.sum_ns),
                profile.sum_ns as f64 / profile.wall_ns.max(1) as f64,
            );
        }
    }
    out += &gaps_text(&profile.gaps);
    out += &work_text("by class", &profile.classes);
    out += &work_text("by kind of layer", &profile.layer_kinds);
    out += &work_text("by kind of layer and class", &profile.layer_classes);
    out += &notes(profile);
    out += &kernels_text(profile);
    out += &chunks_text(profile);
    out
}

fn usage_text(profile: &Profile, u: &Usage) -> String {
    let mut out = String::new();
    let mut line = |name: &str, ns: u64, more: &str| {
        let share = 100.0 * ns as f64 / u.wall_ns.max(1) as f64;
        let _ = writeln!(out, "{name:<13}{:>10.3} ms {share:>6.2} %  {more}", ms(ns));
    };
    line(
        "GPU busy",
        u.busy_ns,
        "kernels and copies, each moment once",
    );
    line(
        "  kernels",
        u.kernel_ns,
        &format!("{} kernels", u.n_kernels),
    );
    let beside = format!(
        "{} copies and fills, {:.3} ms of it beside kernels",
        u.n_copies,
        ms(u.copy_overlap_ns)
    );
    line("  copies", u.copy_ns, &beside);
    line("idle", u.idle_ns, "");
    if let Some(idle) = &profile.idle {
        line(
            "  edges",
            idle.edge_ns,
            "before the first and behind the last activity",
        );
        line(
            "  host",
            idle.host_ns,
            "what follows had not been launched yet",
        );
        let n = format!("{} gaps between the same two kernels", idle.n_recurring);
        line("  recurring", idle.recurring_ns, &n);
        line("  one-time", idle.one_time_ns, "");
    }
    if let Some(t) = &profile.transfers {
        out += &copies_text("to device", &t.host_to_device);
        out += &copies_text("to host", &t.device_to_host);
        out += &copies_text("on device", &t.device_to_device);
        out += &copies_text("fills", &t.memset);
    }
    out
}

fn copies_text(name: &str, copies: &Copies) -> String {
    format!(
        "  {name:<11}{:>10.3} ms  {} copies, {} bytes, {} from or to page-locked memory\n",
        ms(copies.ns),
        copies.n,
        copies.bytes,
        copies.n_pinned
    )
}

fn gaps_text(gaps: &[Gap]) -> String {
    let mut out = String::new();
    if gaps.is_empty() {
        return out;
    }
    let _ = writeln!(out, "\nlongest gaps: us, at ms, cause, between");
    for gap in gaps.iter().take(N_GAPS) {
        let cause = match gap.cause {
            Cause::Edge => "edge",
            Cause::Host => "host",
            Cause::Recurring => "recurring",
            Cause::OneTime => "one-time",
        };
        let call = gap.host_call.as_deref().unwrap_or_default();
        let _ = writeln!(
            out,
            "{:>10.1} {:>10.3}  {cause:<9} {call:<24} {} | {}",
            gap.ns as f64 / 1000.0,
            ms(gap.start_ns),
            short(&gap.before, 40),
            short(&gap.after, 40),
        );
    }
    out
}

/// The beginning of a long name.
fn short(name: &str, n: usize) -> String {
    let name = super::class::short_name(name);
    if name.chars().count() <= n {
        return name.to_owned();
    }
    name.chars().take(n - 3).collect::<String>() + "..."
}

fn work_text(title: &str, rows: &[WorkRow]) -> String {
    let mut out = format!(
        "\n{title:<36}{:>6}{:>11}{:>8}{:>10}{:>9}{:>7}{:>9}{:>9}\n",
        "n", "ms", "wall", "TFLOP/s", "TB/s", "peak", "limit", "perfect"
    );
    for row in rows {
        let class = row.class.map(|c| c.to_string());
        let name = match (&row.layer_kind, class) {
            (Some(kind), Some(class)) => format!("{kind} {class}"),
            (Some(kind), None) => kind.clone(),
            (None, class) => class.unwrap_or_default(),
        };
        let _ = write!(
            out,
            "{:<36}{:>6}{:>11.3} {:>6.2} %",
            short(&name, 36),
            row.n,
            ms(row.ns),
            100.0 * row.share
        );
        if let Some(f) = row.figure {
            let limit = match f.limit {
                super::roofline::Limit::Compute => "compute",
                super::roofline::Limit::Memory => "memory",
            };
            let _ = write!(
                out,
                "{:>10.3}{:>9.4}{:>5.0} %{limit:>9}{:>+7.2} %",
                f.tflop_s,
                f.tb_s,
                100.0 * f.share_of_peak,
                100.0 * f.perfect_gain
            );
        }
        out.push('\n');
    }
    out
}

fn notes(profile: &Profile) -> String {
    let peaks = &profile.peaks;
    let mut out = format!(
        "\npeak: {:.1} TFLOP/s, {:.3} TB/s ({})\nperfect: tokens/s won if all kernels of the row \
         took their ideal time, max(FLOPs / peak, bytes / peak); \
         above 100 % of the peak: operands were still in a cache\n{:.1} % of the time has a node\n",
        peaks.tflop_s,
        peaks.tb_s,
        peaks.source,
        100.0 * profile.placed_share
    );
    for f in &profile.formulas {
        let _ = writeln!(out, "  {:<15} FLOPs: {}; bytes: {}", f.op, f.flops, f.bytes);
    }
    out
}

fn kernels_text(profile: &Profile) -> String {
    let what = match profile.method {
        Method::Cupti => "kernels",
        Method::NodeByNode => "operations",
    };
    let mut out = format!("\n{what}: calls, ms, share of wall, class\n");
    for row in profile.kernels.iter().take(N_KERNELS) {
        let _ = writeln!(
            out,
            "{:>7}{:>11.3}{:>7.2} %  {:<14} {}",
            row.n,
            ms(row.ns),
            100.0 * row.share,
            row.class,
            short(&row.name, 90)
        );
    }
    let rest = profile.kernels.get(N_KERNELS..).unwrap_or_default();
    if !rest.is_empty() {
        let ns = rest.iter().map(|r| r.ns).sum();
        let _ = writeln!(out, "{:>18.3} ms in {} more", ms(ns), rest.len());
    }
    out
}

fn chunks_text(profile: &Profile) -> String {
    let mut out = String::from(
        "\nchunks: tokens at position, bucket, how, host ms, kernel ms, splits, uploads, bytes up, bytes back\n",
    );
    for (i, c) in profile.chunks.iter().enumerate() {
        let _ = writeln!(
            out,
            "{i:>5}{:>7} at {:<8}{:>3}  {:<9}{:>10.3}{:>10.3}{:>3}{:>5}{:>12}{:>12}",
            c.n_tokens,
            c.n_past,
            c.bucket,
            c.how,
            ms(c.host_ns),
            ms(c.kernel_ns),
            c.splits,
            c.n_uploads,
            c.uploaded_bytes,
            c.read_bytes
        );
        if let Some(change) = &c.change {
            let _ = writeln!(out, "      {change}");
        }
    }
    out
}
