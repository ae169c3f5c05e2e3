//! One value of the configuration, and where it came from.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// A value as it counts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Its full name: `tiers.look_every`, `tier.local.store.region`.
    pub key: String,
    /// What counts: sizes in bytes, rates in bytes a second, times in seconds; null where there is none.
    pub value: serde_json::Value,
    /// Where it came from.
    pub from: Provenance,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Provenance {
    /// Nobody said anything.
    Default,
    /// A line of the file.
    File {
        /// Which file.
        file: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// A variable of the environment.
    Variable {
        /// Its name.
        name: String,
    },
    /// The command line, or the call.
    Flag,
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { file, line } => write!(f, "{}:{line}", file.display()),
            Self::Variable { name } => f.write_str(name),
            Self::Flag => f.write_str("command line"),
        }
    }
}

/// Text without the user and password that a URL in it may have.
pub(super) fn without_secrets(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest.get(..end).and_then(|host| host.rfind('@')) {
        Some(at) => format!("{scheme}://***{}", rest.get(at..).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_in_urls_are_not_shown() {
        let shown = without_secrets("http://user:hunter2@host:1/x@y");
        assert_eq!(shown, "http://***@host:1/x@y");
        for plain in ["http://host/a@b", "/a:b@c/d", "s3://bucket/x"] {
            assert_eq!(without_secrets(plain), plain);
        }
    }
}
