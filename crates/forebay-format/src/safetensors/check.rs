//! Whether the entries of a header fit together and fill the file.

use super::parse::Raw;
use super::{Header, HeaderTensor, LENGTH_WORD};
use crate::text::{listed, quoted};
use forebay_error::{Code, Error, Result};
use forebay_tensor::{ShowShape, byte_len};
use std::hash::{BuildHasher, RandomState};

pub(super) fn check(raw: Raw, header_len: u64, data_len: u64) -> Result<Header> {
    let Raw { metadata, mut tensors } = raw;
    let repeated = drop_repeated(&mut tensors);
    let data_start = LENGTH_WORD + header_len;
    if let Err(error) = check_places(&mut tensors, data_start, data_len) {
        // The library drops all but the last entry of a name and stumbles over the hole; the name is the fault.
        return Err(match repeated.iter().find(|repeated| repeated.differs) {
            Some(Repeated { name, .. }) => {
                let what = format!("tensor {} has several entries, which differ", quoted(name));
                Error::new(Code::DuplicateKey, what).with_source(error)
            }
            None => error,
        });
    }
    let mut warnings = Vec::new();
    if !repeated.is_empty() {
        let names = listed(repeated.iter().map(|repeated| repeated.name.as_str()), 5);
        warnings.push(format!(
            "entries that are repeated in the header: {names}; the last of each counts"
        ));
    }
    Ok(Header { metadata, tensors, data_start, warnings })
}

/// A name with several entries.
struct Repeated {
    name: String,
    /// Whether they say different things.
    differs: bool,
}

/// Keeps the last entry of each name; returns the names that had several.
fn drop_repeated(tensors: &mut Vec<HeaderTensor>) -> Vec<Repeated> {
    if hashes_differ(tensors) {
        return Vec::new();
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    let name = |&index: &usize| tensors.get(index).map(|tensor| tensor.name.as_str());
    // Stable: among equal names the later entry stays later.
    order.sort_by(|a, b| name(a).cmp(&name(b)));
    let mut dropped: Vec<usize> = Vec::new();
    let mut repeated: Vec<Repeated> = Vec::new();
    for pair in order.windows(2) {
        let [a, b] = pair else { continue };
        let (Some(first), Some(second)) = (tensors.get(*a), tensors.get(*b)) else { continue };
        if first.name != second.name {
            continue;
        }
        dropped.push(*a);
        let differs = first != second;
        match repeated.last_mut().filter(|last| last.name == first.name) {
            Some(last) => last.differs |= differs,
            None => repeated.push(Repeated { name: first.name.clone(), differs }),
        }
    }
    dropped.sort_unstable();
    let mut dropped = dropped.into_iter().peekable();
    let mut index = 0;
    tensors.retain(|_| {
        let drop = dropped.next_if_eq(&index).is_some();
        index += 1;
        !drop
    });
    repeated
}

/// Whether no two names have one hash. Comparing a million names in earnest takes a second, this a tenth of it; the
/// hash is keyed by chance, so nobody can make names that collide.
fn hashes_differ(tensors: &[HeaderTensor]) -> bool {
    let state = RandomState::new();
    let mut hashes: Vec<u64> = tensors.iter().map(|tensor| state.hash_one(&tensor.name)).collect();
    hashes.sort_unstable();
    hashes.is_sorted_by(|a, b| a < b)
}

/// Sorts the tensors by place and checks that they fill the data.
fn check_places(tensors: &mut [HeaderTensor], data_start: u64, data_len: u64) -> Result<()> {
    if let Some(tensor) = tensors.iter().find(|tensor| tensor.end < tensor.begin) {
        let (name, begin, end) = (quoted(&tensor.name), tensor.begin, tensor.end);
        let what = format!("tensor {name} ends at byte {end}, before its start at byte {begin}");
        return Err(Error::new(Code::OffsetsReversed, what));
    }
    tensors.sort_by_key(|tensor| (tensor.begin, tensor.end));
    let mut previous: Option<&HeaderTensor> = None;
    for tensor in tensors.iter() {
        check_start(tensor, previous)?;
        check_size(tensor)?;
        previous = Some(tensor);
    }
    check_end(tensors, data_start, data_len)
}

fn check_start(tensor: &HeaderTensor, previous: Option<&HeaderTensor>) -> Result<()> {
    let expected = previous.map_or(0, |previous| previous.end);
    let begin = tensor.begin;
    if begin == expected {
        return Ok(());
    }
    let name = quoted(&tensor.name);
    if begin > expected {
        let what = format!(
            "tensor {name} starts at byte {begin} of the data, expected {expected}: \
             the {} bytes between belong to no tensor",
            begin - expected
        );
        return Err(Error::new(Code::OffsetHole, what));
    }
    let other = previous.map(|previous| quoted(&previous.name)).unwrap_or_default();
    let what = format!(
        "tensor {name} starts at byte {begin} of the data, expected {expected}: \
         it shares bytes with tensor {other}"
    );
    Err(Error::new(Code::OffsetOverlap, what))
}

fn check_size(tensor: &HeaderTensor) -> Result<()> {
    let name = || quoted(&tensor.name);
    let needed = byte_len(tensor.dtype, &tensor.shape).map_err(|error| {
        Error::new(error.code(), format!("tensor {}: {}", name(), error.what()))
    })?;
    let held = tensor.end - tensor.begin;
    if needed != held {
        let what = format!(
            "tensor {} needs {needed} bytes ({} of shape {}), its offsets give it {held}",
            name(),
            tensor.dtype,
            ShowShape(&tensor.shape)
        );
        return Err(Error::new(Code::ShapeSizeMismatch, what));
    }
    Ok(())
}

fn check_end(tensors: &[HeaderTensor], data_start: u64, data_len: u64) -> Result<()> {
    let end = tensors.last().map_or(0, |tensor| tensor.end);
    let has = data_start.saturating_add(data_len);
    let cut = tensors.iter().find(|tensor| tensor.end > data_len);
    let cut = cut.map(|tensor| quoted(&tensor.name)).unwrap_or_default();
    let Some(needs) = data_start.checked_add(end) else {
        let what = format!("tensor {cut} ends past byte 2^64 of the file");
        return Err(Error::new(Code::OutOfBounds, what));
    };
    if needs > has {
        let what = format!(
            "truncated, file has {has} bytes, needs {needs}; \
             tensor {cut} is the first that is not whole"
        );
        return Err(Error::new(Code::Truncated, what).hint("download or copy the file again"));
    }
    if needs < has {
        let what = format!(
            "{} bytes follow the last tensor: file has {has} bytes, \
             its header accounts for {needs}",
            has - needs
        );
        return Err(Error::new(Code::TrailingBytes, what));
    }
    Ok(())
}
