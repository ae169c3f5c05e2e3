//! Damaged and hostile manifests: found by the reader when it reads the place, and by the auditor; never a panic, never
//! memory on the word of a number.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod manifest_jobs;

use forebay_checkpoint::audit::check_manifest;
use forebay_checkpoint::manifest::{Named, Part, Place};
use forebay_error::{Code, Error};
use forebay_format::crc::crc32;
use forebay_tensor::{Dtype, Mesh, Placement, Region};
use manifest_jobs::{Job, Numbers, Saved, everything, layout, open, random};

/// A change of the four numbers of a section.
type Change<'a> = dyn Fn(&mut (u32, u32, u64, u64)) + 'a;
use proptest::prelude::*;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Everything there is to read.
fn read_all(bytes: &[u8]) -> Result<(), Error> {
    let manifest = open(bytes, None)?;
    manifest.files()?;
    for entry in manifest.entries()? {
        manifest.entry(&entry.name)?;
    }
    manifest.visit(|_, _, _| Ok(()))?;
    manifest.check_sections()
}

/// Two ranks, a replicated, a sharded and a ragged tensor, an object, another name: all sections have something.
fn small() -> Saved {
    let (row, column) = (Placement::Shard(0), Placement::Replicate);
    let mesh = Arc::new(Mesh::new(vec![2, 2]).unwrap());
    let values = vec![
        Named::tensor("w", Dtype::F32, &[4]).with_layout(0),
        Named::alias("t", "w"),
        Named::tensor("r", Dtype::U8, &[3]),
        Named::object("o"),
    ];
    let structure = forebay_checkpoint::manifest::Structure::new(
        vec![mesh],
        vec![layout(&[row, column])],
        values,
    );
    let mut job = Job::new(2, 4, structure.unwrap());
    let find = |job: &Job, name: &str| job.structure.find(name).unwrap().1.clone();
    let named = find(&job, "w");
    // Another replica of each shard, so that there is a list.
    job.store_shard(0, &named);
    job.store_shard(3, &named);
    let named = find(&job, "r");
    for (rank, at) in [(1, 0), (2, 1), (3, 2)] {
        let region = Region::new(vec![at], vec![1]).unwrap();
        job.store(rank, &named, Place::Box(region.clone()), &region);
    }
    let named = find(&job, "o");
    job.store_whole(2, &named);
    job.store_whole(1, &Named::object("own"));
    job.finish()
}

#[test]
fn every_flipped_bit_is_found_by_the_reader_and_by_the_auditor() {
    let (mut bytes, seal) = small().bytes();
    read_all(&bytes).unwrap();
    assert_eq!(check_manifest(&bytes, Some(&seal)), []);
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = read_all(&bytes).expect_err(&format!("bit {bit}"));
        let code = error.code();
        let known = [
            Code::Checksum,
            Code::InvalidMetadata,
            Code::Unsupported,
            Code::Truncated,
            Code::TrailingBytes,
        ];
        assert!(known.contains(&code), "bit {bit}: {error:?}");
        let place = error.place().unwrap_or_else(|| panic!("bit {bit}: {error:?}"));
        assert!(place.starts_with("manifest m"), "bit {bit}: {error:?}");
        assert!(!check_manifest(&bytes, None).is_empty(), "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn a_manifest_that_ends_early_or_late_is_found() {
    let (bytes, _) = small().bytes();
    for end in 0..bytes.len() {
        assert_eq!(open(&bytes[..end], None).err().unwrap().code(), Code::Truncated, "{end}");
        assert!(!check_manifest(&bytes[..end], None).is_empty(), "{end}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert_eq!(open(&longer, None).err().unwrap().code(), Code::TrailingBytes);
    assert!(!check_manifest(&longer, None).is_empty());
}

#[test]
fn another_manifest_than_the_one_that_was_committed_is_refused() {
    let (bytes, seal) = small().bytes();
    let mut other = seal;
    other[31] ^= 1;
    let error = open(&bytes, Some(&other)).err().unwrap();
    assert_eq!(error.code(), Code::Checksum);
    assert!(!error.hints().is_empty());
    assert!(!check_manifest(&bytes, Some(&other)).is_empty());
}

/// A manifest taken apart, to be changed and put together again with right checksums.
#[derive(Clone)]
struct Apart {
    minor: u16,
    sections: Vec<(u32, Vec<u8>)>,
}

impl Apart {
    fn of(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let section = |number: usize| {
            let at = 28 + 24 * number;
            let (start, len) = (long(at + 8), long(at + 16));
            (word(at), bytes[start..start + len].to_vec())
        };
        Self { minor: 0, sections: (0..word(24) as usize).map(section).collect() }
    }

    fn rows(&self) -> Vec<(u32, u32, u64, u64)> {
        let mut start = 32 + 24 * self.sections.len() as u64;
        let row = |(id, bytes): &(u32, Vec<u8>)| {
            let row = (*id, crc32(bytes), start, bytes.len() as u64);
            start += bytes.len() as u64;
            row
        };
        self.sections.iter().map(row).collect()
    }

    fn together(&self) -> Vec<u8> {
        self.with_rows(&self.rows())
    }

    /// With a section table that need not be true.
    fn with_rows(&self, rows: &[(u32, u32, u64, u64)]) -> Vec<u8> {
        let body: Vec<u8> = self.sections.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        let header_len = 32 + 24 * rows.len();
        let mut out = b"\x89FBM\r\n\x1a\n".to_vec();
        out.extend(1u16.to_le_bytes());
        out.extend(self.minor.to_le_bytes());
        out.extend((header_len as u32).to_le_bytes());
        out.extend(((header_len + body.len()) as u64).to_le_bytes());
        out.extend((rows.len() as u32).to_le_bytes());
        for (id, crc, start, len) in rows {
            out.extend(id.to_le_bytes());
            out.extend(crc.to_le_bytes());
            out.extend(start.to_le_bytes());
            out.extend(len.to_le_bytes());
        }
        out.extend(crc32(&out).to_le_bytes());
        out.extend(body);
        out
    }

    /// Puts right what must agree with the parts: their own checksums, and their hashes in the index.
    fn sign_parts(&mut self, lengths: &[usize]) {
        let mut at = 0;
        let mut digests = Vec::new();
        for len in lengths {
            let part = &mut self.sections[5].1[at..at + len];
            let crc = crc32(&part[16..]);
            part[12..16].copy_from_slice(&crc.to_le_bytes());
            digests.extend(Sha256::digest(&*part));
            at += len;
        }
        let index = &mut self.sections[3].1;
        let columns = index.len() - digests.len();
        index[columns..].copy_from_slice(&digests);
    }
}

#[test]
fn hostile_section_tables_are_refused() {
    let apart = Apart::of(&small().bytes().0);
    let rows = apart.rows();
    read_all(&apart.together()).unwrap();
    let refused = |rows: &[(u32, u32, u64, u64)], what: &str| {
        let bytes = apart.with_rows(rows);
        let error = read_all(&bytes).err().unwrap_or_else(|| panic!("{what}"));
        assert_ne!(error.code(), Code::Internal, "{what}");
        assert!(!check_manifest(&bytes, None).is_empty(), "{what}");
    };
    for number in 0..rows.len() {
        let with = |change: &Change<'_>| {
            let mut rows = rows.clone();
            change(&mut rows[number]);
            rows
        };
        refused(&with(&|row| row.0 = 0), "unknown id, one missing");
        refused(&with(&|row| row.0 = 1 + row.0 % 6), "an id twice");
        refused(&with(&|row| row.1 ^= 1), "a wrong checksum");
        for change in [1, u64::MAX, u64::MAX / 2, 1 << 32] {
            refused(&with(&|row| row.2 = row.2.wrapping_add(change)), "an offset");
            refused(&with(&|row| row.3 = row.3.wrapping_add(change)), "a length");
        }
        refused(&with(&|row| row.3 = 0), "an empty section");
        let mut fewer = rows.clone();
        fewer.remove(number);
        refused(&fewer, "a section is missing");
        let mut swapped = rows.clone();
        swapped.swap(number, (number + 1) % rows.len());
        refused(&swapped, "two sections swapped");
    }
    refused(&[], "no sections");
    refused(&vec![rows[0]; 65], "too many sections");
    // Two that overlap, three that add up.
    let mut rows = rows.clone();
    rows[1].2 -= 1;
    rows[1].3 += 1;
    refused(&rows, "an overlap");
}

#[test]
fn later_minor_versions_are_read_and_later_major_versions_are_not() {
    let saved = small();
    let mut apart = Apart::of(&saved.bytes().0);
    apart.minor = 7;
    apart.sections.insert(4, (77, b"what a later version knows".to_vec()));
    apart.sections.push((78, Vec::new()));
    // The parts have a field of a later version too.
    let mut parts = Vec::new();
    let mut columns = Vec::new();
    for part in &saved.parts {
        let mut part = part.clone();
        part[10] = 7;
        part.extend([0x63, 3, 1, 2, 3]);
        let len = part.len() as u64;
        part[16..24].copy_from_slice(&len.to_le_bytes());
        columns.push(part.len());
        parts.extend(part);
    }
    let old_lengths: usize =
        saved.parts.iter().map(|part| if part.len() < 128 { 1 } else { 2 }).sum();
    let index = &mut apart.sections[3].1;
    let mut new_index = vec![index[0]];
    for &len in &columns {
        new_index.extend(if len < 128 {
            vec![len as u8]
        } else {
            vec![len as u8 | 0x80, (len >> 7) as u8]
        });
    }
    new_index.extend(&index[1 + old_lengths..]);
    *index = new_index;
    let place = apart.sections.iter().position(|section| section.0 == 6).unwrap();
    apart.sections[place].1 = parts;
    let last = apart.sections.remove(place);
    let extra = apart.sections.remove(4);
    apart.sections.insert(5, last);
    apart.sign_parts(&columns);
    apart.sections.insert(4, extra);
    let bytes = apart.together();
    let manifest = open(&bytes, None).unwrap();
    assert_eq!(manifest.entries().unwrap(), saved.entries);
    assert_eq!(check_manifest(&bytes, None), []);

    let mut later = saved.bytes().0;
    later[8] = 2;
    let error = open(&later, None).err().unwrap();
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.what().contains("2.0") && error.hints()[0].contains("later version"));
    let mut later = saved.parts[0].clone();
    later[8] = 2;
    assert_eq!(Part::decode(&later, "part").unwrap_err().code(), Code::Unsupported);
}

/// Changes bytes behind right checksums. The reader must not panic; and what the auditor has nothing to say of the
/// reader must be able to read, or the two understand the format differently.
fn change_behind_checksums(saved: &Saved, numbers: &mut Numbers) {
    let apart = Apart::of(&saved.bytes().0);
    let lengths: Vec<usize> = saved.parts.iter().map(Vec::len).collect();
    for _ in 0..60 {
        let mut changed = apart.clone();
        // Not the info: JSON is somebody else's format.
        let sections = [1, 2, 3, 4, 5].map(|number| changed.sections[number].1.len() as u64);
        let number = 1 + numbers.below(5) as usize;
        let len = sections[number - 1];
        if len == 0 {
            continue;
        }
        for _ in 0..1 + numbers.below(3) {
            let at = numbers.below(len) as usize;
            let byte = &mut changed.sections[number].1[at];
            *byte = match numbers.below(4) {
                0 => byte.wrapping_add(1),
                1 => byte.wrapping_sub(1),
                2 => *byte ^ 1 << numbers.below(8),
                _ => numbers.next() as u8,
            };
        }
        let in_digests = number == 3;
        if number == 5 || !in_digests {
            changed.sign_parts(&lengths);
        }
        // Lists of holders have their checksum in the table; change it there too.
        let bytes = changed.together();
        let findings = check_manifest(&bytes, None);
        let read = read_all(&bytes);
        if let Err(error) = &read {
            assert_ne!(error.code(), Code::Internal, "{error:?}");
            assert!(!findings.is_empty(), "section {}: {error:?}", number + 1);
        }
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn reader_and_auditor_understand_changed_bytes_alike(seed: u64) {
        change_behind_checksums(&random(seed), &mut Numbers(seed));
    }

    #[test]
    fn parts_of_any_bytes_do_no_harm(seed: u64) {
        let saved = random(seed);
        let mut numbers = Numbers(seed);
        for part in &saved.parts {
            let mut part = part.clone();
            let at = 24 + numbers.below(part.len() as u64 - 24) as usize;
            part[at] = numbers.next() as u8;
            part.truncate(24.max(part.len() - numbers.below(3) as usize));
            let len = part.len() as u64;
            part[16..24].copy_from_slice(&len.to_le_bytes());
            let crc = crc32(&part[16..]);
            part[12..16].copy_from_slice(&crc.to_le_bytes());
            if let Err(error) = Part::decode(&part, "part") {
                prop_assert!(error.code() != Code::Internal && error.place().is_some());
            }
        }
    }
}

#[test]
fn everything_survives_changes_behind_its_checksums() {
    let saved = everything();
    let mut numbers = Numbers(17);
    (0..20).for_each(|_| change_behind_checksums(&saved, &mut numbers));
}

/// A tensor that parts cover with a hole or an overlap, behind right checksums: the auditor sees it.
#[test]
fn the_auditor_sees_holes_overlaps_and_wrong_holders() {
    let saved = small();
    let lengths: Vec<usize> = saved.parts.iter().map(Vec::len).collect();
    let apart = Apart::of(&saved.bytes().0);
    // The region of rank 1's chunk of "r" is its one box of one dimension: 1, offset 0, size 1.
    let part = Part::decode(&saved.parts[1], "part").unwrap();
    let boxed = part.chunks().iter().filter(|chunk| matches!(chunk.place, Place::Box(_))).count();
    assert_eq!(boxed, 1);
    let start = lengths[0];
    let body = &apart.sections[5].1[start..start + lengths[1]];
    // Kind 2 once or after another kind, then dims, offset, size at the end of the chunk field.
    let at = body.windows(3).rposition(|window| window == [1, 0, 1]).unwrap();
    for offset in [1, 2] {
        let mut changed = apart.clone();
        changed.sections[5].1[start + at + 1] = offset;
        changed.sign_parts(&lengths);
        let findings = check_manifest(&changed.together(), None);
        assert!(findings.iter().any(|finding| finding.what.contains("meet")), "{findings:?}");
        assert!(findings.iter().all(|finding| finding.place == "\"r\""), "{findings:?}");
    }
}

/// Parts refer to values by numbers in the structure of a hash: it must be that of the table.
#[test]
fn the_auditor_sees_a_table_that_is_not_of_its_structure() {
    let saved = everything();
    let apart = Apart::of(&saved.bytes().0);
    assert_eq!(check_manifest(&apart.together(), None), []);
    let hash = saved.structure.hash();
    let text = forebay_format::hex(&hash);
    let info = &apart.sections[0].1;
    let at = info.windows(64).position(|window| window == text.as_bytes()).unwrap();
    let mut said = apart.clone();
    said.sections[0].1[at] = if info[at] == b'0' { b'1' } else { b'0' };
    // A row under another name: numbers would still find it.
    let mut renamed = apart.clone();
    let table = &mut renamed.sections[2].1;
    let at = table.windows(4).position(|window| window == b"norm").unwrap();
    table[at + 3] = b'n';
    for changed in [said, renamed] {
        let findings = check_manifest(&changed.together(), None);
        assert!(findings.iter().any(|finding| finding.place == "structure"), "{findings:?}");
    }
}
