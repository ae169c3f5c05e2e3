//! How names out of files appear in messages: quoted, control characters escaped, long ones cut.

use std::borrow::Cow;
use std::path::Path;

const SHOWN_CHARS: usize = 200;

/// A name in quotes, safe to print on a terminal.
pub(crate) fn quoted(name: &str) -> String {
    match name.char_indices().nth(SHOWN_CHARS) {
        Some((cut, _)) => {
            let head = name.get(..cut).unwrap_or_default();
            format!("{head:?}... ({} bytes)", name.len())
        }
        None => format!("{name:?}"),
    }
}

/// A path as people write it, or quoted where it holds control characters.
pub fn shown(path: &Path) -> String {
    let text = path.to_string_lossy();
    match text.chars().any(char::is_control) {
        true => format!("{text:?}"),
        false => text.into_owned(),
    }
}

/// Text that can be shown: what would steer a terminal or reorder a line is escaped as Rust does, `\u{1b}`.
pub fn harmless(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unseen) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unseen(c) {
            shown.extend(c.escape_debug());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Controls, and the marks that change the direction of text or break lines unseen.
pub fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The first names of a list, and how many more there are.
pub(crate) fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>, limit: usize) -> String {
    let rest = names.len().saturating_sub(limit);
    let mut text = names.take(limit).map(quoted).collect::<Vec<_>>().join(", ");
    if rest > 0 {
        text.push_str(&format!(" and {rest} more"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_write_to_the_terminal_or_fill_it() {
        assert_eq!(quoted("a\u{1b}[31m"), "\"a\\u{1b}[31m\"");
        assert!(quoted(&"é".repeat(3000)).len() < 500);
        assert_eq!(harmless("step é"), "step é");
        assert_eq!(harmless("a\n\u{202e}b\u{1b}"), "a\\n\\u{202e}b\\u{1b}");
        assert_eq!(shown(Path::new("/a b")), "/a b");
        assert_eq!(shown(Path::new("/a\nb")), "\"/a\\nb\"");
        assert_eq!(listed(["a", "b", "c"].into_iter(), 2), "\"a\", \"b\" and 1 more");
    }
}
