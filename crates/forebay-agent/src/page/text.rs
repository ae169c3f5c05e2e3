//! Text from stores and clients, cut where it is too long to look at.

use std::borrow::Cow;

/// Longer texts are cut: what a store calls an error may be a whole page.
const CHARS_MAX: usize = 600;

/// Its beginning, where it is long.
pub(super) fn cut(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_long_is_cut() {
        assert_eq!(cut(&"é".repeat(5000)).chars().count(), CHARS_MAX + 1);
        assert_eq!(cut("short"), "short");
    }
}
