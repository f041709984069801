//! The same prompt through our engine and through llama.cpp, in turns: same file, same process,
//! same threads, same cache type. Timed region for both: ids in host memory to last logits in host
//! memory, behind an empty cache.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::spread::{Spread, speedup};
use super::{Args, PeerReport};
use crate::cli::{Console, Interrupted, Progress, Unit, drive, report};
use crate::engine::{Rows, Session};
use crate::peer::{self, Llama, PeerOptions};

/// Largest squared error of the last row relative to its square.
///
/// # Source
/// `docs/numerics.md`: Q8_0 against another implementation; other types stay far below.
const NMSE_LIMIT: f64 = 3e-3;

/// Distance of the two best logits below which rounding may swap them.
///
/// # Source
/// `docs/numerics.md`: Q8_0 against another implementation.
const GAP_LIMIT: f32 = 1.2;

/// Times both sides in turns and compares their last logits.
pub(super) fn compare(
    path: &Path,
    ids: &[u32],
    session: &mut Session,
    args: &Args,
    console: &Console,
) -> anyhow::Result<PeerReport> {
    let options = args.engine.to_options()?;
    let mut llama = Llama::load(
        path,
        PeerOptions {
            n_ctx: ids.len() + args.n_gen,
            n_ubatch: args.peer_ubatch,
            kv_type: options.kv_type,
            n_threads: options.n_threads,
            device: options.device,
            ..PeerOptions::default()
        },
    )
    .context("load the model into llama.cpp")?;
    let ours = prefill(session, ids, console)?.1;
    let theirs = llama.eval(ids, peer::Rows::Last).context("run llama.cpp")?;
    let nmse = nmse(&ours, &theirs.data);
    let argmax_equal = drive::argmax(&ours) == drive::argmax(&theirs.data);
    let argmax_gap = gap(&theirs.data);

    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let bar = console.progress("compare", 2 * args.rounds as u64, Unit::Runs);
    for round in 0..args.rounds {
        // Every other round starts with the other side, so that a drift of the clock hits both.
        for side in [round % 2 == 0, round % 2 != 0] {
            if console.interrupt().is_requested() {
                return Err(Interrupted.into());
            }
            if side {
                ours.push(prefill(session, ids, console)?.0);
            } else {
                theirs.push(llama.time_prefill(ids).context("run llama.cpp")?);
            }
            bar.set((ours.len() + theirs.len()) as u64);
        }
    }
    drop(bar);
    let spread_of = |samples: &[Duration]| Spread::of(samples).context("no timed run");
    let (speedup, speedup_spread) = speedup(spread_of(&ours)?, spread_of(&theirs)?);
    Ok(PeerReport {
        n_rounds: args.rounds,
        n_ubatch: args.peer_ubatch,
        ours_us: ours.iter().map(|&d| report::to_us(d)).collect(),
        theirs_us: theirs.iter().map(|&d| report::to_us(d)).collect(),
        speedup,
        speedup_spread,
        nmse,
        nmse_limit: NMSE_LIMIT,
        argmax_equal,
        argmax_gap,
        is_valid: (argmax_equal || argmax_gap < GAP_LIMIT) && nmse <= NMSE_LIMIT,
    })
}

/// One prefill of an empty session: its time and the last row.
fn prefill(
    session: &mut Session,
    ids: &[u32],
    console: &Console,
) -> anyhow::Result<(Duration, Vec<f32>)> {
    session.reset();
    let start = Instant::now();
    let logits = drive::prefill(session, ids, &Rows::Last, &Progress::hidden(), console)?;
    let duration = start.elapsed();
    Ok((duration, logits.row(0).context("read logits")?.to_vec()))
}

/// Squared error of `ours` relative to the square of `theirs`.
fn nmse(ours: &[f32], theirs: &[f32]) -> f64 {
    let pairs = || {
        ours.iter()
            .zip(theirs)
            .map(|(&a, &b)| (f64::from(a), f64::from(b)))
    };
    let error: f64 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
    let power: f64 = pairs().map(|(_, b)| b * b).sum();
    error / power
}

/// Distance of the two largest values.
fn gap(row: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &value in row {
        if value > first {
            (first, second) = (value, first);
        } else if value > second {
            second = value;
        }
    }
    first - second
}

#[cfg(test)]
mod tests {
    use super::{gap, nmse};

    #[test]
    fn gap_is_between_the_two_largest_in_any_order() {
        assert_eq!(gap(&[1.0, 7.0, 4.0]), 3.0);
        assert_eq!(gap(&[4.0, 1.0, 7.0]), 3.0);
        assert_eq!(gap(&[7.0, 7.0]), 0.0);
    }

    #[test]
    fn nmse_is_relative_to_the_reference() {
        assert_eq!(nmse(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(nmse(&[0.0, 0.0], &[3.0, 4.0]), 1.0);
        assert!(nmse(&[f32::NAN], &[1.0]).is_nan());
    }
}
