//! Digests: of a model's files against what the caller expects, and of tensors.

use std::str::FromStr;
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_format::{Model, OpenFile, hex, read_tensor, verify_checks};
use sha2::{Digest, Sha256};

use crate::console::Console;
use crate::progress::Progress;
use crate::{interrupt, parallel};

/// `[FILE=]HEX`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    file: Option<String>,
    hex: String,
}

impl FromStr for Expected {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (file, digits) = match text.rsplit_once('=') {
            Some((file, digits)) => (Some(file.to_owned()), digits),
            None => (None, text),
        };
        if digits.len() != 64 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err("a SHA-256 has 64 hexadecimal digits".to_owned());
        }
        Ok(Self { file, hex: digits.to_ascii_lowercase() })
    }
}

/// Checks the files that the caller gave digests for; their names. A file is read whole, before anything is loaded,
/// through the descriptor that the load will use; that it does not change in between is checked after the load.
///
/// Errors: `checksum`; `usage` for a file that the model does not have.
pub(crate) fn check_files(
    model: &Model,
    expected: &[Expected],
    console: &Console,
) -> Result<Vec<String>> {
    let mut jobs: Vec<(&Arc<OpenFile>, &str, &Expected)> = Vec::new();
    for expected in expected {
        let index = find(model, expected)?;
        if let (Some(open), Some(file)) = (model.files.get(index), model.catalog.files.get(index)) {
            jobs.push((open, &file.name, expected));
        }
    }
    let total = jobs.iter().map(|(open, _, _)| open.size()).sum();
    let progress = Progress::new(console, "verifying", total);
    parallel::map(&jobs, forebay_topology::worker_cpus(), |_, (open, name, expected)| {
        let found = sha256_of_file(open, &progress)?;
        if found == expected.hex {
            return Ok((*name).to_owned());
        }
        let what = format!("SHA-256 is {found}, expected {}", expected.hex);
        Err(Error::new(Code::Checksum, what)
            .at(open.path.display())
            .hint("download or copy the file again, or correct the digest"))
    })
}

fn find(model: &Model, expected: &Expected) -> Result<usize> {
    let files = &model.catalog.files;
    let Some(wanted) = &expected.file else {
        return match files.len() {
            1 => Ok(0),
            count => {
                let what = format!("a SHA-256 without a file, and the model has {count} files");
                Err(Error::new(Code::Usage, what).hint("say FILE=HEX"))
            }
        };
    };
    let found = files.iter().position(|file| file.name == *wanted);
    found.ok_or_else(|| {
        let names = files.iter().take(3).map(|file| file.name.as_str()).collect::<Vec<_>>();
        Error::new(Code::Usage, format!("the model has no file {wanted:?}")).hint(format!(
            "its files: {}{}",
            names.join(", "),
            ellipsis(files.len())
        ))
    })
}

fn ellipsis(count: usize) -> &'static str {
    if count > 3 { ", ..." } else { "" }
}

/// SHA-256 of a whole file, with a look around after every piece.
fn sha256_of_file(open: &OpenFile, progress: &Progress) -> Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0_u8; 1 << 20];
    let mut done = 0;
    while done < open.size() {
        let len = (open.size() - done).min(buffer.len() as u64);
        let Some(part) = buffer.get_mut(..len as usize) else { break };
        open.read_exact_at(part, done)?;
        hasher.update(&*part);
        done += len;
        progress.add(len);
        interrupt::check()?;
    }
    Ok(hex(&hasher.finalize()))
}

/// SHA-256 of every one of these tensors, in hexadecimal digits. Bytes whose checksum the format keeps are compared
/// with it first, so that no digest is one of damaged bytes.
pub(crate) fn digests(model: &Model, tensors: &[usize], console: &Console) -> Result<Vec<String>> {
    checksums(model, tensors, console)?;
    let entries = || tensors.iter().filter_map(|&index| model.catalog.tensors.get(index));
    let total = entries().fold(0_u64, |sum, entry| sum.saturating_add(entry.bytes));
    let progress = Progress::new(console, "hashing", total);
    let jobs: Vec<_> = entries().collect();
    let digests = parallel::map(&jobs, forebay_topology::worker_cpus(), |_, entry| {
        let mut hasher = Sha256::new();
        read_tensor(&model.files, entry, |bytes| {
            hasher.update(bytes);
            progress.add(bytes.len() as u64);
            interrupt::check()
        })
        .map_err(|error| error.at(format!("tensor {:?}", entry.name)))?;
        Ok(hex(&hasher.finalize()))
    })?;
    model.check_unchanged()?;
    Ok(digests)
}

/// Compares the bytes that these tensors lie in with the checksums that the format keeps; how many there were, and of
/// how many bytes. Plain safetensors have none.
pub(crate) fn checksums(
    model: &Model,
    tensors: &[usize],
    console: &Console,
) -> Result<(usize, u64)> {
    if model.catalog.checks.is_empty() {
        return Ok((0, 0));
    }
    let checks = model.catalog.checks.iter();
    let total = checks.fold(0_u64, |sum, check| sum.saturating_add(check.bytes));
    let progress = Progress::new(console, "checking", total);
    verify_checks(&model.catalog, &model.files, tensors, |bytes| {
        progress.add(bytes);
        interrupt::check()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_strictly() {
        let digits = "AB".repeat(32);
        let plain: Expected = digits.parse().unwrap();
        assert_eq!(plain, Expected { file: None, hex: "ab".repeat(32) });
        let named: Expected = format!("a=b.safetensors={digits}").parse().unwrap();
        assert_eq!(named.file.as_deref(), Some("a=b.safetensors"));
        for bad in ["", "abc", "a=", &format!("{digits}0"), &"g".repeat(64)] {
            assert!(bad.parse::<Expected>().is_err(), "{bad}");
        }
    }
}
