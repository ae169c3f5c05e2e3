//! Text from stores and clients, made harmless to look at: controls and marks that reorder a line become visible.

use std::borrow::Cow;

/// Longer texts are cut: what a store calls an error may be a whole page.
const CHARS_MAX: usize = 600;

/// See the module.
pub(super) fn shown(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unseen) {
        return Cow::Borrowed(text);
    }
    let mut harmless = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unseen(c) {
            harmless.extend(c.escape_default());
        } else {
            harmless.push(c);
        }
    }
    Cow::Owned(harmless)
}

/// Its beginning, where it is long.
pub(super) fn cut(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(text),
    }
}

fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unseen_is_shown_and_what_is_long_is_cut() {
        assert_eq!(shown("step é"), "step é");
        assert_eq!(shown("a\n\u{202e}b"), "a\\n\\u{202e}b");
        assert_eq!(cut(&"é".repeat(5000)).chars().count(), CHARS_MAX + 1);
        assert_eq!(cut("short"), "short");
    }
}
