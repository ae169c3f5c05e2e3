//! A line of the terminal: never wider than it, and nothing in it that steers it.

use crate::console::clean;

/// Styles, as codes of ECMA-48.
pub(super) const PLAIN: &str = "";
pub(super) const BOLD: &str = "1";
pub(super) const DIM: &str = "2";
pub(super) const GOOD: &str = "32";
pub(super) const WARN: &str = "33";
pub(super) const BAD: &str = "31";
pub(super) const WATER: &str = "36";

/// A line that grows up to a width.
pub(super) struct Line {
    text: String,
    used: usize,
    width: usize,
    color: bool,
}

impl Line {
    pub(super) fn new(width: usize, color: bool) -> Self {
        Self { text: String::new(), used: 0, width, color }
    }

    /// Adds text; what does not fit is cut. Characters count as one column each: names of steps and tiers are ASCII,
    /// and what is wider is cut by the terminal.
    pub(super) fn put(&mut self, style: &str, text: &str) -> &mut Self {
        let text = clean(text);
        let room = self.width.saturating_sub(self.used);
        let count = text.chars().count();
        let cut: String = match count > room {
            true => {
                text.chars().take(room.saturating_sub(1)).chain("…".chars().take(room)).collect()
            }
            false => text.into_owned(),
        };
        self.used += count.min(room);
        match self.color && !style.is_empty() && !cut.is_empty() {
            true => self.text.push_str(&format!("\x1b[{style}m{cut}\x1b[0m")),
            false => self.text.push_str(&cut),
        }
        self
    }

    /// Adds text in a column of that width, and a space.
    pub(super) fn column(&mut self, style: &str, text: &str, width: usize) -> &mut Self {
        let shown: String = text.chars().take(width).collect();
        self.put(style, &format!("{shown:<width$} "))
    }

    /// The same with the text at the right.
    pub(super) fn number(&mut self, style: &str, text: &str, width: usize) -> &mut Self {
        self.put(style, &format!("{text:>width$} "))
    }

    /// A bar: `share` of `width` columns.
    pub(super) fn bar(&mut self, style: &str, share: f64, width: usize) -> &mut Self {
        // From 0 to 1, whatever it is.
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        let full = (share * width as f64).round() as usize;
        self.put(style, &"█".repeat(full));
        self.put(DIM, &"░".repeat(width - full.min(width))).put(PLAIN, " ")
    }

    pub(super) fn end(&self) -> String {
        self.text.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_and_clean() {
        let mut line = Line::new(10, false);
        line.put(BAD, "ab\u{1b}[2Jcdefgh").put(PLAIN, "more");
        assert_eq!(line.end().chars().count(), 10);
        assert!(line.end().starts_with("ab\\u{1b}") && line.end().ends_with('…'));
        let mut line = Line::new(20, true);
        line.put(GOOD, "ok").bar(WATER, f64::NAN, 2).bar(WATER, 2.0, 2);
        assert_eq!(line.end(), "\u{1b}[32mok\u{1b}[0m\u{1b}[2m░░\u{1b}[0m \u{1b}[36m██\u{1b}[0m");
        assert_eq!(Line::new(0, false).put(PLAIN, "x").end(), "");
    }
}
