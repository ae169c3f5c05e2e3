//! The one error type of the Forebay crates.
//!
//! An error answers three questions: *what* went wrong, *where* (file, tensor, byte), and what to do about it
//! (hints). Its [`Code`] is stable: scripts match on it, Python maps each code to a typed exception, and
//! `docs/ERRORS.md` explains each. The rendering on a terminal is
//!
//! ```text
//! error[truncated]: file ends inside the header, model-00002-of-00004.safetensors
//!   caused by: unexpected end of file
//! hint: download the file again
//! ```
//!
//! `Display` gives the first line without the code and never the cause, so that a chain prints each text once.

mod code;

pub use code::{Category, Code};

use std::error::Error as StdError;
use std::fmt;

/// Shorthand for results of the Forebay crates.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with a stable code, a place and hints. One word wide, so that `Result` stays small.
pub struct Error(Box<Inner>);

struct Inner {
    code: Code,
    what: String,
    place: Option<String>,
    hints: Vec<String>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of `code`; `what` is lower case, without a final period.
    pub fn new(code: Code, what: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            code,
            what: what.into(),
            place: None,
            hints: Vec::new(),
            source: None,
        }))
    }

    /// An I/O error, with the code that its kind calls for (not found, permission, no space, out of memory, else `io`).
    pub fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::new(Code::of_io(&source), what).with_source(source)
    }

    /// Says where: a file, and as far as known the tensor and the byte. A place that is there already stays.
    #[must_use]
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        if self.0.place.is_none() {
            self.0.place = Some(place.to_string());
        }
        self
    }

    /// Says more of the place: `file` becomes `file, tensor "w"`. Where there is none it becomes the place.
    #[must_use]
    pub fn within(mut self, part: impl fmt::Display) -> Self {
        self.0.place = Some(match &self.0.place {
            Some(place) => format!("{place}, {part}"),
            None => part.to_string(),
        });
        self
    }

    /// Adds a line that says what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hints.push(hint.into());
        self
    }

    /// Sets the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The same error once more, for the next who asks: causes come along as their texts.
    #[must_use]
    pub fn again(&self) -> Self {
        let mut cause = self.source();
        let mut texts = Vec::new();
        while let Some(error) = cause {
            texts.push(error.to_string());
            cause = error.source();
        }
        let source = texts.into_iter().rev().fold(None, |source, text| {
            let cause: Box<dyn StdError + Send + Sync> = Box::new(Told { text, source });
            Some(cause)
        });
        Self(Box::new(Inner {
            code: self.0.code,
            what: self.0.what.clone(),
            place: self.0.place.clone(),
            hints: self.0.hints.clone(),
            source,
        }))
    }

    /// The stable code.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// What went wrong, without the place.
    pub fn what(&self) -> &str {
        &self.0.what
    }

    /// Where, if known.
    pub fn place(&self) -> Option<&str> {
        self.0.place.as_deref()
    }

    /// What to do, a line each.
    pub fn hints(&self) -> &[String] {
        &self.0.hints
    }

    /// The whole message as the command prints it: code, what, where, causes, hints; a line each, no final newline.
    pub fn render(&self) -> String {
        let mut text = format!("error[{}]: {self}", self.code().as_str());
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(&format!("\n  caused by: {error}"));
            cause = error.source();
        }
        for hint in self.hints() {
            text.push_str(&format!("\nhint: {hint}"));
        }
        text
    }
}

/// The text of a cause that was told before.
#[derive(Debug)]
struct Told {
    text: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl StdError for Told {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.what)?;
        match &self.0.place {
            Some(place) => write!(f, ", {place}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0.source {
            Some(source) => Some(source.as_ref()),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_prints_each_text_once() {
        let cause = std::io::Error::from_raw_os_error(5);
        let error = Error::io("cannot read 4096 bytes", cause).at("a.safetensors").hint("check it");
        let text = error.render();
        let start = "error[io]: cannot read 4096 bytes, a.safetensors\n  caused by: ";
        assert!(text.starts_with(start));
        assert!(text.ends_with("\nhint: check it"));
        assert_eq!(text.matches("cannot read").count(), 1);
    }

    #[test]
    fn an_error_told_again_says_the_same() {
        let cause = Error::io("cannot read", std::io::Error::from_raw_os_error(5)).at("disk");
        let error = Error::new(Code::Io, "no data").at("a").hint("b").with_source(cause);
        assert_eq!(error.again().again().render(), error.render());
    }

    #[test]
    fn the_first_place_is_the_nearest_and_stays() {
        let error = Error::new(Code::Truncated, "short").at("tensor w").at("file");
        assert_eq!(error.place(), Some("tensor w"));
        assert_eq!(error.within("byte 7").place(), Some("tensor w, byte 7"));
    }

    #[test]
    fn io_kinds_have_codes() {
        let code = |errno| Error::io("x", std::io::Error::from_raw_os_error(errno)).code();
        assert_eq!(code(2), Code::NotFound);
        assert_eq!(code(13), Code::PermissionDenied);
        assert_eq!(code(28), Code::NoSpace);
        assert_eq!(code(12), Code::OutOfMemory);
        assert_eq!(code(5), Code::Io);
    }

    #[test]
    fn codes_are_distinct_and_documented() {
        let mut names: Vec<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Code::ALL.len());
        let page = include_str!("../../../docs/ERRORS.md");
        for name in names {
            assert!(page.contains(&format!("| `{name}` |")), "docs/ERRORS.md lacks `{name}`");
        }
    }
}
