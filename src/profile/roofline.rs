//! How near work is to what the device can do, and what a perfect kernel would win.
//!
//! A kernel that does `f` FLOPs and moves at least `b` bytes cannot take less than
//! `ideal = max(f / peak_f, b / peak_b)`. Its share of the peak is `ideal / time`. If it ran in its
//! ideal time, the whole prefill would be faster by `wall / (wall - (time - ideal)) - 1`.

use serde::Serialize;

/// What work needs at least, by closed form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Work {
    /// Floating-point operations; a multiply and an add are two.
    pub flops: f64,
    /// Bytes read and written, each once.
    pub bytes: f64,
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.flops += other.flops;
        self.bytes += other.bytes;
    }
}

/// The most that a device does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Peaks {
    /// TFLOP/s of a BF16 matrix product.
    pub tflop_s: f64,
    /// TB/s of a copy, reads and writes added.
    pub tb_s: f64,
    /// Where the two numbers are from.
    pub source: String,
}

/// Which of the two peaks bounds some work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The arithmetic.
    Compute,
    /// The memory.
    Memory,
}

/// Some work, the time it took, and what follows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// TFLOP/s reached.
    pub tflop_s: f64,
    /// TB/s reached.
    pub tb_s: f64,
    /// Shortest time on this device, in nanoseconds.
    pub ideal_ns: f64,
    /// Share of the peak: ideal time over time.
    pub share_of_peak: f64,
    /// What bounds it.
    pub limit: Limit,
    /// Speed-up of the whole prefill if it took its ideal time: 0.01 is 1 % more tokens/s.
    pub perfect_gain: f64,
}

/// Shortest time of some work, in nanoseconds, and what bounds it.
pub fn ideal_ns(work: Work, peaks: &Peaks) -> (f64, Limit) {
    // 1 TFLOP/s is 1000 FLOP/ns, 1 TB/s is 1000 bytes/ns.
    let compute = work.flops / (peaks.tflop_s * 1000.0);
    let memory = work.bytes / (peaks.tb_s * 1000.0);
    if compute > memory {
        (compute, Limit::Compute)
    } else {
        (memory, Limit::Memory)
    }
}

/// Speed-up of a whole that takes `wall_ns` when `saved_ns` of it fall away.
///
/// Nothing is won where nothing is saved; the whole cannot fall away.
pub fn gain(wall_ns: f64, saved_ns: f64) -> f64 {
    let saved = saved_ns.max(0.0);
    if saved >= wall_ns {
        return 0.0;
    }
    wall_ns / (wall_ns - saved) - 1.0
}

/// Sums over kernels of what they need and took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// What they need.
    pub work: Work,
    /// What they took, in nanoseconds.
    pub ns: f64,
    /// Shortest times, summed.
    pub ideal_ns: f64,
    /// The part of it that arithmetic bounds.
    compute_ns: f64,
    /// What perfect kernels would save: a kernel that beats its bound (its operands were still in
    /// a cache) saves nothing.
    saved_ns: f64,
}

impl Tally {
    /// Adds one kernel.
    pub fn add(&mut self, work: Work, ns: f64, peaks: &Peaks) {
        let (ideal, limit) = ideal_ns(work, peaks);
        self.work += work;
        self.ns += ns;
        self.ideal_ns += ideal;
        self.saved_ns += (ns - ideal).max(0.0);
        if limit == Limit::Compute {
            self.compute_ns += ideal;
        }
    }

    /// Compares with the peaks; `None` without work or time.
    pub fn figure(&self, wall_ns: f64) -> Option<Figure> {
        if self.ns <= 0.0 || self.ideal_ns <= 0.0 || !self.ideal_ns.is_finite() {
            return None;
        }
        Some(Figure {
            tflop_s: self.work.flops / self.ns / 1000.0,
            tb_s: self.work.bytes / self.ns / 1000.0,
            ideal_ns: self.ideal_ns,
            share_of_peak: self.ideal_ns / self.ns,
            limit: if 2.0 * self.compute_ns > self.ideal_ns {
                Limit::Compute
            } else {
                Limit::Memory
            },
            perfect_gain: gain(wall_ns, self.saved_ns),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(work: Work, ns: f64, wall_ns: f64, peaks: &Peaks) -> Option<Figure> {
        let mut tally = Tally::default();
        tally.add(work, ns, peaks);
        tally.figure(wall_ns)
    }

    fn near(found: f64, expected: f64, digits: i32) {
        let bound = 0.5 * 10_f64.powi(-digits);
        assert!(
            (found - expected).abs() <= bound,
            "expected {expected}, found {found}"
        );
    }

    /// The worked example of minfer's record 58: a fused SwiGLU on a device of 273 GB/s. Its text
    /// gives 27 launches only as "about 7.2 ms", and the wall only through "+0.74 %"; both solve to
    /// 27 launches in 985 ms. From its token rate the wall would be 1042 ms; the verdict is the same.
    #[test]
    fn minfer_example_gives_its_numbers_and_its_verdict() {
        let peaks = Peaks {
            tflop_s: 1000.0,
            tb_s: 0.273,
            source: "specification".into(),
        };
        let (read, written) = (502.2e6, 70.9e6);
        let work = Work {
            flops: 0.0,
            bytes: read + written,
        };
        let ns = 2.367e6;

        let one = figure(work, ns, 985e6, &peaks).unwrap();
        let saved_per_launch_ns = ns - one.ideal_ns;
        let all = gain(985e6, 27.0 * saved_per_launch_ns);

        near(work.bytes / 1e6, 573.1, 1);
        near(one.tb_s * 1000.0, 242.0, 0);
        near(one.share_of_peak * 100.0, 89.0, 0);
        near(one.ideal_ns / 1e6, 2.099, 3);
        near(saved_per_launch_ns / 1e6, 0.268, 3);
        near(27.0 * saved_per_launch_ns / 1e6, 7.2, 1);
        near(all * 100.0, 0.74, 2);
        near(gain(1042e6, 27.0 * saved_per_launch_ns) * 100.0, 0.70, 2);
        assert!(all < 0.015, "its bar is 1.5 %");
        assert_eq!(one.limit, Limit::Memory);
    }

    /// 2048 rows of E4B's joined gate and up projection, as measured on an H200.
    #[test]
    fn large_product_is_bound_by_arithmetic() {
        let peaks = Peaks {
            tflop_s: 780.0,
            tb_s: 4.26,
            source: "measured".into(),
        };
        let (k, n, m) = (2560.0, 20480.0, 2048.0);
        let work = Work {
            flops: 2.0 * k * n * m,
            bytes: 2.0 * k * n + 2.0 * k * m + 4.0 * n * m,
        };

        let figure = figure(work, 339.5e3, 100e6, &peaks).unwrap();

        assert_eq!(figure.limit, Limit::Compute);
        near(figure.tflop_s, 633.0, 0);
        near(figure.share_of_peak, 633.0 / 780.0, 2);
    }

    #[test]
    fn nothing_saved_wins_nothing() {
        assert_eq!(gain(100.0, -5.0), 0.0);
        assert_eq!(gain(100.0, 100.0), 0.0);
        assert_eq!(gain(0.0, 0.0), 0.0);
        near(gain(100.0, 50.0), 1.0, 9);
        assert_eq!(
            figure(
                Work::default(),
                5.0,
                10.0,
                &Peaks {
                    tflop_s: 1.0,
                    tb_s: 1.0,
                    source: String::new()
                }
            ),
            None
        );
    }
}
