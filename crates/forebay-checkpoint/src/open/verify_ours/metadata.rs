//! `.metadata` of ours, compared with the manifest.
//!
//! First what it says, so that a fault is told by name. Then all of its bytes: with the manifest at hand it is known
//! what this version writes, but for the address that it gives for people. A checkpoint of another version may be
//! spelled in another way; there, a difference that means nothing is a warning.

use std::collections::{BTreeMap, HashMap};

use forebay_error::{Code, Error, Result};
use forebay_format::dcp::metadata::{DcpMetadata, EntryKind, Step};
use forebay_format::{hex, shown};
use forebay_tensor::ShowShape;

use super::{Fault, Ours, Verified};
use crate::commit::METADATA;
use crate::manifest::Manifest;
use crate::model::{Entry, Kind, PathStep};
use crate::open::Concern;
use crate::save::{Facts, Seal, stamp};

/// What the attribute of ours has had from the first version on.
const FIRST_KEYS: [&str; 5] = ["attempt", "manifest", "manifest_sha256", "version", "seal"];

/// Notes what is wrong with `.metadata`.
pub(super) fn compare(own: &Ours<'_>, manifest: &Manifest, found: &mut Verified) {
    let table = match &own.table {
        Ok(table) => table,
        Err(error) => return found.of_file(own.folder, METADATA, error.again()),
    };
    let before = found.faults.len();
    match (manifest.entries(), manifest.files()) {
        (Ok(entries), Ok(files)) => {
            let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
            compare_entries(own, table, &entries, &names, found);
        }
        (Err(error), _) | (_, Err(error)) => found.of_file(own.folder, &own.name, error),
    }
    compare_seal(own, table, manifest, found);
    if found.faults.len() == before {
        compare_bytes(own, table, manifest, found);
    } else {
        found.checked_bytes += own.bytes.len() as u64;
    }
}

fn compare_entries(
    own: &Ours<'_>,
    table: &DcpMetadata,
    entries: &[Entry],
    files: &[&str],
    found: &mut Verified,
) {
    let mut fault = |name: &str, what: String| {
        let place = format!("{}, {name:?}", shown(&own.folder.path().join(METADATA)));
        let error = Error::new(Code::InvalidMetadata, what).at(place);
        let (file, name) = (METADATA.to_owned(), Some(name.to_owned()));
        found.add(Fault { file, name, offset: None, error });
    };
    let mut wanted: HashMap<&str, &Entry> =
        entries.iter().map(|entry| (entry.name.as_str(), entry)).collect();
    for listed in table.entries() {
        let Some(entry) = wanted.remove(listed.name) else {
            fault(listed.name, "it is not in the manifest".to_owned());
            continue;
        };
        if let Err(what) = compare_kind(table, &listed.kind, &entry.kind, files) {
            fault(listed.name, what);
        }
        let path = listed.path.as_deref().unwrap_or_default();
        if !entry.path.is_empty() && !same_path(path, &entry.path) {
            fault(listed.name, "its way in the nested state is another in the manifest".to_owned());
        }
    }
    let mut missing: Vec<&str> = wanted.into_keys().collect();
    missing.sort_unstable();
    for name in missing {
        fault(name, "it is in the manifest alone".to_owned());
    }
    if let Some(item) = table.stale().first() {
        fault(&item.name, "a place of something that is not listed".to_owned());
    }
}

/// Of a chunk: its sizes, file, first byte and bytes.
type Stored<'a> = (Vec<u64>, &'a str, u64, u64);

fn compare_kind(
    table: &DcpMetadata,
    listed: &EntryKind<'_>,
    wanted: &Kind,
    files: &[&str],
) -> Result<(), String> {
    let name = |number: usize| table.files().get(number).map_or("", String::as_str);
    let file = |number: u32| files.get(number as usize).copied().unwrap_or_default();
    match (listed, wanted) {
        (EntryKind::Object { place }, Kind::Object { chunk }) => {
            let listed = (name(place.file), place.offset, place.length);
            match listed == (file(chunk.file), chunk.offset, chunk.length) {
                true => Ok(()),
                false => Err("the object is at another place in the manifest".to_owned()),
            }
        }
        (
            EntryKind::Tensor { element, shape, chunks },
            Kind::Tensor { dtype, shape: sides, chunks: own },
        ) => {
            if element.dtype != Some(*dtype) {
                return Err(format!("it is of torch.{}, in the manifest {dtype}", element.torch));
            }
            if shape != sides {
                let (a, b) = (ShowShape(shape), ShowShape(sides));
                return Err(format!("its shape is {a}, in the manifest {b}"));
            }
            let listed: BTreeMap<Vec<u64>, Stored<'_>> = chunks
                .clone()
                .filter(|chunk| !chunk.sizes.contains(&0))
                .filter_map(|chunk| {
                    let place = chunk.place?;
                    let stored =
                        (chunk.sizes.to_vec(), name(place.file), place.offset, place.length);
                    Some((chunk.offsets.to_vec(), stored))
                })
                .collect();
            let wanted: BTreeMap<Vec<u64>, Stored<'_>> = own
                .iter()
                .map(|chunk| {
                    let region = &chunk.region;
                    let stored =
                        (region.sizes.clone(), file(chunk.file), chunk.offset, chunk.length);
                    (region.offsets.clone(), stored)
                })
                .collect();
            compare_chunks(&listed, &wanted)
        }
        _ => Err("it is a tensor in one, an object in the other".to_owned()),
    }
}

fn compare_chunks(
    listed: &BTreeMap<Vec<u64>, Stored<'_>>,
    wanted: &BTreeMap<Vec<u64>, Stored<'_>>,
) -> Result<(), String> {
    for (offsets, stored) in wanted {
        match listed.get(offsets) {
            None => return Err(format!("its piece at {offsets:?} is in the manifest alone")),
            Some(other) if other != stored => {
                let what = format!("its piece at {offsets:?} is another in the manifest");
                return Err(what);
            }
            Some(_) => {}
        }
    }
    match listed.keys().find(|offsets| !wanted.contains_key(*offsets)) {
        Some(offsets) => Err(format!("its piece at {offsets:?} is not in the manifest")),
        None => Ok(()),
    }
}

fn same_path(listed: &[Step<'_>], wanted: &[PathStep]) -> bool {
    let same = |(a, b): (&Step<'_>, &PathStep)| match (a, b) {
        (Step::Key(a), PathStep::Key(b)) => a == b,
        (Step::Index(a), PathStep::Index(b)) => a == b,
        _ => false,
    };
    listed.len() == wanted.len() && listed.iter().zip(wanted).all(same)
}

/// The line of ours and what it repeats, and the name of the save.
fn compare_seal(own: &Ours<'_>, table: &DcpMetadata, manifest: &Manifest, found: &mut Verified) {
    let Some(seal) = &own.seal else { return };
    let info = manifest.info();
    let mut odd = Vec::new();
    if seal.attempt.to_string() != info.attempt {
        odd.push("the attempt is another in the manifest");
    }
    let value = attribute(table);
    let says = |key: &str, wanted: &str| {
        let found = value.as_ref().and_then(|value| value.get(key));
        found.and_then(serde_json::Value::as_str) == Some(wanted)
    };
    let repeats = says("attempt", &info.attempt)
        && says("manifest", &seal.manifest)
        && says("manifest_sha256", &hex(&seal.hash));
    if !repeats {
        odd.push("the attribute `forebay` does not say what its line does");
    }
    let save_id = table.storage_meta().and_then(|meta| meta.save_id.clone());
    if save_id.as_deref() != Some(info.attempt.as_str()) {
        odd.push("it is of another save than the manifest");
    }
    for what in odd {
        found.of_file(own.folder, METADATA, Error::new(Code::InvalidMetadata, what));
    }
    if let Err(error) = check_stamp(own, value.as_ref()) {
        found.of_file(own.folder, METADATA, error);
    }
}

/// Compares `.metadata` with its own CRC. The first versions put none in, and nothing else that is not checked above.
fn check_stamp(own: &Ours<'_>, value: Option<&serde_json::Value>) -> Result<()> {
    if stamp::check(&own.bytes)? {
        return Ok(());
    }
    let known = |key: &String| FIRST_KEYS.contains(&key.as_str());
    let pairs = value.and_then(serde_json::Value::as_object);
    match pairs.is_some_and(|pairs| pairs.keys().all(known)) {
        true => Ok(()),
        false => Err(Error::new(Code::Checksum, "its CRC of itself is damaged")),
    }
}

/// What the attribute of ours says.
fn attribute(table: &DcpMetadata) -> Option<serde_json::Value> {
    let value = table.attribute(crate::save::ATTRIBUTE)?.json().ok()?;
    serde_json::from_str(value).ok()
}

/// Compares all bytes with those that this version writes.
fn compare_bytes(own: &Ours<'_>, table: &DcpMetadata, manifest: &Manifest, found: &mut Verified) {
    let Some(seal) = &own.seal else { return };
    let written = match written(table, manifest, seal) {
        Ok(written) => written,
        Err(error) => {
            let text = format!("the bytes of .metadata could not be compared: {error}");
            return found.warn(Concern::Other, text);
        }
    };
    found.checked_bytes += own.bytes.len() as u64;
    if written == own.bytes {
        return;
    }
    let pairs = written.iter().zip(&own.bytes);
    let at = pairs.into_iter().position(|(a, b)| a != b);
    let at = at.unwrap_or_else(|| written.len().min(own.bytes.len()));
    let what = format!("byte {at} is not what is written for the manifest");
    if manifest.info().forebay == env!("CARGO_PKG_VERSION") {
        let error = Error::new(Code::InvalidMetadata, what);
        let error = error.at(shown(&own.folder.path().join(METADATA)));
        let (file, offset) = (METADATA.to_owned(), Some(at as u64));
        found.add(Fault { file, name: None, offset, error });
    } else {
        let by = &manifest.info().forebay;
        let text = format!(".metadata means what the manifest says; {what} (by Forebay {by:?})");
        found.warn(Concern::Other, text);
    }
}

fn written(table: &DcpMetadata, manifest: &Manifest, seal: &Seal) -> Result<Vec<u8>> {
    let own = |step: &Step<'_>| match step {
        Step::Key(key) => PathStep::Key((*key).to_owned()),
        Step::Index(index) => PathStep::Index(*index),
    };
    // Where the parts do not have the ways they were given beside them.
    let known = |name: &str| manifest.value(name).is_some_and(|named| !named.path.is_empty());
    let paths = table.entries().filter(|entry| !known(entry.name)).filter_map(|entry| {
        let path = entry.path?.iter().map(own).collect();
        Some((entry.name.to_owned(), path))
    });
    let place = table.storage_meta().and_then(|meta| meta.checkpoint_id.clone());
    let facts = Facts {
        attempt: seal.attempt,
        info: manifest.info().clone(),
        place: place.unwrap_or_default(),
        paths: paths.collect(),
    };
    // The first versions put no CRC in.
    let stamped = attribute(table).is_some_and(|value| value.get(stamp::KEY).is_some());
    crate::save::metadata(&facts, manifest, &manifest.files()?, seal, stamped)
}
