//! Rust text with its comments and literals blanked out.
//!
//! What is blanked becomes spaces and line ends stay, so that lines and columns are those of the
//! original. Enough of the language is known: nested block comments, raw strings, byte and C
//! strings, and that `'a` is a lifetime and `'a'` is not.

/// Copies characters or blanks them, one at a time.
struct Blanker {
    input: Vec<char>,
    at: usize,
    output: String,
}

/// The text without comments, and without what is inside of strings and characters.
pub(crate) fn code_only(text: &str) -> String {
    let mut blanker =
        Blanker { input: text.chars().collect(), at: 0, output: String::with_capacity(text.len()) };
    blanker.run();
    blanker.output
}

impl Blanker {
    fn run(&mut self) {
        while let Some(next) = self.peek(0) {
            match next {
                '/' if self.peek(1) == Some('/') => self.line_comment(),
                '/' if self.peek(1) == Some('*') => self.block_comment(),
                '"' => self.string(),
                'r' if self.starts_raw() => self.raw_string(),
                '\'' => self.quote(),
                _ if is_word(next) => self.word(),
                _ => self.keep(),
            }
        }
    }

    fn peek(&self, ahead: usize) -> Option<char> {
        self.input.get(self.at + ahead).copied()
    }

    fn keep(&mut self) {
        self.output.extend(self.peek(0));
        self.at += 1;
    }

    fn blank(&mut self) {
        if let Some(next) = self.peek(0) {
            self.output.push(if next == '\n' { '\n' } else { ' ' });
        }
        self.at += 1;
    }

    /// A word as a whole, so that the `r` at the end of one does not start a raw string. The
    /// prefixes of literals (`b`, `c`, `br`, `cr`) end where their literal starts.
    fn word(&mut self) {
        while self.peek(0).is_some_and(is_word) {
            let prefix = self.starts_raw() && matches!(self.output.chars().last(), Some('b' | 'c'));
            self.keep();
            if prefix {
                self.at -= 1;
                self.output.pop();
                return self.raw_string();
            }
        }
    }

    fn line_comment(&mut self) {
        while self.peek(0).is_some_and(|next| next != '\n') {
            self.blank();
        }
    }

    fn block_comment(&mut self) {
        let mut depth = 0_usize;
        while self.peek(0).is_some() {
            match (self.peek(0), self.peek(1)) {
                (Some('/'), Some('*')) => {
                    depth += 1;
                    self.blank();
                }
                (Some('*'), Some('/')) => {
                    depth -= 1;
                    self.blank();
                }
                _ => {}
            }
            self.blank();
            if depth == 0 {
                return;
            }
        }
    }

    fn string(&mut self) {
        self.keep();
        while let Some(next) = self.peek(0) {
            match next {
                '\\' => {
                    self.blank();
                    self.blank();
                }
                '"' => return self.keep(),
                _ => self.blank(),
            }
        }
    }

    fn starts_raw(&self) -> bool {
        let hashes = self.hashes(1);
        self.peek(0) == Some('r') && self.peek(1 + hashes) == Some('"')
    }

    fn hashes(&self, from: usize) -> usize {
        (from..).take_while(|ahead| self.peek(*ahead) == Some('#')).count()
    }

    fn raw_string(&mut self) {
        let hashes = self.hashes(1);
        for _ in 0..hashes + 2 {
            self.keep();
        }
        while let Some(next) = self.peek(0) {
            if next == '"' && self.hashes(1) >= hashes {
                for _ in 0..=hashes {
                    self.keep();
                }
                return;
            }
            self.blank();
        }
    }

    /// `'x'` and `'\n'` are characters; a quote without its partner opens a lifetime.
    fn quote(&mut self) {
        self.keep();
        if self.peek(0) == Some('\\') {
            self.blank();
            self.blank();
            while self.peek(0).is_some_and(|next| next != '\'') {
                self.blank();
            }
            self.keep();
        } else if self.peek(1) == Some('\'') {
            self.blank();
            self.keep();
        }
    }
}

/// Whether a character belongs to names.
pub(crate) fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked() {
        let blank = |text: &str| code_only(text);
        assert_eq!(blank("a // b\nc"), "a     \nc");
        assert_eq!(blank("a /* b /* c */ d */ e"), "a                   e");
        assert_eq!(blank(r#"f("x{\"y") + 1"#), r#"f("     ") + 1"#);
        assert_eq!(blank("r#\"a\"b\"# c"), "r#\"   \"# c");
        assert_eq!(blank("br\"{\" cr#\"}\"#"), "br\" \" cr#\" \"#");
        assert_eq!(blank("for\"{\""), "for\" \"");
        assert_eq!(blank("('{', '\\'', '\\u{7b}')"), "(' ', '  ', '      ')");
        assert_eq!(blank("fn f<'a>(x: &'a str) {}"), "fn f<'a>(x: &'a str) {}");
        assert_eq!(blank("b'\\\\' b'{' r#fn"), "b'  ' b' ' r#fn");
        assert_eq!(blank("\"a\nb\""), "\" \n \"");
        assert_eq!(blank("'"), "'");
        assert_eq!(blank("/* open"), "       ");
    }
}
