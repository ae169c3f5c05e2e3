//! Paths out of a file: they must stay in the folder of that file.

use crate::text::quoted;
use forebay_error::{Code, Error, Result};

/// The longest path, as Linux has it.
pub(super) const MAX_PATH_BYTES: usize = 4096;

/// Fails with `unsafe_path` unless the path names something below the folder that it is relative to, in one plain way:
/// names divided by single slashes, none of them `.` or `..`, no backslash, no drive, no NUL. Links inside the folder
/// are its owner's business.
pub fn check_relative_path(path: &str) -> Result<()> {
    let mut parts = path.split('/');
    let why = if path.is_empty() {
        "is empty"
    } else if path.len() > MAX_PATH_BYTES {
        "is too long"
    } else if path.starts_with('/') {
        "is absolute"
    } else if path.contains('\0') {
        "holds a NUL"
    } else if path.contains('\\') {
        "holds a backslash, which some systems take for a slash"
    } else if has_drive(path) {
        "starts with a drive"
    } else if path.split('/').any(|part| part == "..") {
        "leaves the folder"
    } else if parts.any(|part| part.is_empty() || part == ".") {
        "is not in its plain form"
    } else {
        return Ok(());
    };
    let what = format!("the path {} of a data file {why}", quoted(path));
    Err(Error::new(Code::UnsafePath, what).hint(
        "data files lie in the folder of .metadata or below; this one was changed or made to harm",
    ))
}

fn has_drive(path: &str) -> bool {
    matches!(path.as_bytes(), [letter, b':', ..] if letter.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_their_folder() {
        for path in ["__0_0.distcp", "a/b.distcp", "a..b", "...", ".hidden", "ü:x", "a b"] {
            assert!(check_relative_path(path).is_ok(), "{path}");
        }
        let long = "a".repeat(4097);
        for path in [
            "",
            "/etc/passwd",
            "//x",
            "..",
            "../x",
            "a/../../x",
            "a/..",
            ".",
            "./a",
            "a//b",
            "a/",
            "a\0",
            "..\\x",
            "a\\..\\..\\x",
            "\\\\server\\x",
            "C:\\x",
            "c:x",
            &long,
        ] {
            assert_eq!(check_relative_path(path).unwrap_err().code(), Code::UnsafePath, "{path}");
        }
    }
}
