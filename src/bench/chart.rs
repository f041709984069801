//! Tokens per second over the length of the prompt, as SVG: both sides of every model.

use plotters::prelude::*;

use super::report::{PointReport, SideReport};
use super::{BenchError, Report, Result};

/// Width and height in pixels.
const SIZE: (u32, u32) = (960, 540);
/// Room above the fastest point, as a factor.
const HEADROOM: f64 = 1.15;
/// Room beside the shortest and longest prompt, as a factor.
const SIDEROOM: f64 = 1.25;
/// Labels of the lengths, at the most.
const X_LABELS: usize = 12;
/// Colours that are told apart by people who do not see red or green (Okabe, Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// One line: length, median, quartiles.
struct Series {
    name: String,
    points: Vec<(f64, f64, f64, f64)>,
}

/// The chart; `None` when no prompt was measured.
///
/// # Errors
/// [`BenchError::Chart`] when the drawing library refuses.
pub fn svg(report: &Report) -> Result<Option<String>> {
    let series = series(report);
    if series.is_empty() {
        return Ok(None);
    }
    let mut text = String::new();
    draw(&mut text, &series).map_err(|detail| BenchError::Chart { detail })?;
    Ok(Some(text))
}

/// Valid prompts by model and side, by length.
fn series(report: &Report) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    let prompts = report
        .points
        .iter()
        .filter(|p| p.kind == "prefill" && p.valid);
    for point in prompts {
        for side in [Some(&point.ours), point.peer.as_ref()]
            .into_iter()
            .flatten()
        {
            let Some(values) = values(point, side) else {
                continue;
            };
            let name = format!("{} {}", point.label, side.name);
            match all.iter_mut().find(|s| s.name == name) {
                Some(series) => series.points.push(values),
                None => all.push(Series {
                    name,
                    points: vec![values],
                }),
            }
        }
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

fn values(point: &PointReport, side: &SideReport) -> Option<(f64, f64, f64, f64)> {
    let (time, n) = (side.time_us?, point.n_prompt as f64);
    Some((
        n,
        n / time.median * 1e6,
        n / time.q3 * 1e6,
        n / time.q1 * 1e6,
    ))
}

/// The label at a binary logarithm, where it stands for a whole one.
fn power_of_two(log2: f64) -> String {
    let is_whole = (log2 - log2.round()).abs() < 1e-6;
    if is_whole {
        format!("{:.0}", log2.exp2())
    } else {
        String::new()
    }
}

fn draw(text: &mut String, series: &[Series]) -> std::result::Result<(), String> {
    let points = || series.iter().flat_map(|s| &s.points);
    let longest = points().map(|p| p.0).fold(1.0, f64::max);
    let shortest = points().map(|p| p.0).fold(longest, f64::min);
    let fastest = points().map(|p| p.3).fold(0.0, f64::max);
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    let words = |e: DrawingAreaErrorKind<_>| e.to_string();
    root.fill(&WHITE).map_err(words)?;
    // plotters' own logarithmic axis labels powers of ten only; prompts are powers of two.
    let x_range = (shortest / SIDEROOM).log2()..(longest * SIDEROOM).log2();
    let mut chart = ChartBuilder::on(&root)
        .caption("Prefill", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(76)
        .build_cartesian_2d(x_range, 0.0..fastest * HEADROOM)
        .map_err(words)?;
    chart
        .configure_mesh()
        .x_desc("prompt, tokens (log)")
        .y_desc("tokens/s (median, quartiles)")
        .x_label_formatter(&|x| power_of_two(*x))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .light_line_style(TRANSPARENT)
        .x_labels(X_LABELS)
        .draw()
        .map_err(words)?;
    for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let line = series.points.iter().map(|p| (p.0.log2(), p.1));
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)))
            .map_err(words)?
            .label(series.name.as_str())
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        let bars = series.points.iter();
        let bars =
            bars.map(|p| ErrorBar::new_vertical(p.0.log2(), p.2, p.1, p.3, colour.filled(), 8));
        chart.draw_series(bars).map_err(words)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
        .map_err(words)?;
    root.present().map_err(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_labelled_at_powers_of_two() {
        assert_eq!(power_of_two(9.0), "512");
        assert_eq!(power_of_two(17.0), "131072");
        assert_eq!(power_of_two(9.5), "");
    }

    #[test]
    fn chart_labels_the_lengths_and_names_the_lines() {
        let points = [512.0, 2048.0, 8192.0, 32768.0, 131_072.0];
        let line = |name: &str, speed: f64| Series {
            name: name.to_owned(),
            points: points
                .iter()
                .map(|&n| (n, speed, speed * 0.98, speed * 1.02))
                .collect(),
        };
        let mut text = String::new();

        draw(&mut text, &[line("m ours", 5e4), line("m peer", 1e4)]).unwrap();

        for word in ["2048", "8192", "32768", "131072", "m ours", "m peer"] {
            assert!(text.contains(&format!("\n{word}\n")), "no {word} in {text}");
        }
    }
}
