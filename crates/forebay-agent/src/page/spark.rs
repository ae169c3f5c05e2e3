//! The flow of the last minutes as two small curves, in SVG: what comes in is filled, what goes out is a line.

use super::html::Html;
use crate::job::{SAMPLE_EVERY, SAMPLES_MAX};
use crate::words;

/// Units of the picture; it is stretched to the card.
const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 40.0;

pub(super) fn curves(html: &mut Html, rates: &[(f64, f64)]) {
    let most = rates.iter().map(|(read, write)| read.max(*write)).fold(0.0, f64::max);
    if rates.len() < 2 || most < 1.0 {
        return;
    }
    let minutes = SAMPLES_MAX as u64 * SAMPLE_EVERY.as_secs() / 60;
    let label = format!("Last {minutes} minutes; at most {}", words::rate(most));
    let attributes: [(&'static str, &dyn std::fmt::Display); 5] = [
        ("class", &"spark"),
        ("viewBox", &format_args!("0 0 {WIDTH} {HEIGHT}")),
        ("preserveAspectRatio", &"none"),
        ("role", &"img"),
        ("aria-label", &label),
    ];
    html.open("svg", &attributes);
    let start = SAMPLES_MAX.saturating_sub(rates.len());
    let at = |index: usize| (start + index) as f64 * WIDTH / (SAMPLES_MAX - 1) as f64;
    let points = |of: fn(&(f64, f64)) -> f64| {
        let mut points = String::new();
        for (index, rate) in rates.iter().enumerate() {
            let y = HEIGHT - 1.0 - of(rate) / most * (HEIGHT - 2.0);
            points.push_str(&format!("{:.1},{y:.1} ", at(index)));
        }
        points
    };
    let (first, last) = (at(0), at(rates.len() - 1));
    let area = format!("{first:.1},{HEIGHT} {}{last:.1},{HEIGHT}", points(|rate| rate.1));
    html.open("polygon", &[("class", &"in"), ("points", &area)]).close("polygon");
    html.open("polyline", &[("class", &"out"), ("points", &points(|rate| rate.0))]);
    html.close("polyline").close("svg");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_stay_in_the_picture() {
        let mut html = Html::new();
        curves(&mut html, &[(0.0, 5e9), (1e9, 0.0), (5e9, 2.5e9)]);
        let text = html.finish();
        assert!(text.contains("at most 5.00 GB/s"), "{text}");
        assert!(
            text.contains("points=\"296.0,40 296.0,1.0 298.0,39.0 300.0,20.0 300.0,40\""),
            "{text}"
        );
        for dull in [vec![], vec![(1.0, 1.0)], vec![(0.0, 0.0); 9]] {
            let mut html = Html::new();
            curves(&mut html, &dull);
            assert_eq!(html.finish(), "");
        }
    }
}
