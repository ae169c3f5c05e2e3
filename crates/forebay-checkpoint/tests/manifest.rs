//! Manifests: what goes in comes out, the auditor agrees, and what does not fit together is refused.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod manifest_jobs;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_checkpoint::audit::check_manifest;
use forebay_checkpoint::manifest::{
    Builder, ItemPlace, Manifest, MemorySource, Named, Part, PartFile, Place, Structure, Value,
    ValueRef,
};
use forebay_checkpoint::model::{Chunk, Entry, Kind};
use forebay_engine::RangeSource;
use forebay_error::{Code, Result};
use forebay_tensor::{Dtype, Mesh, Placement, Region};
use manifest_jobs::{ATTEMPT, Job, Numbers, Saved, everything, layout, open, random};
use proptest::prelude::*;

/// Everything that the reader says of a checkpoint is what was stored.
fn check_against(saved: &Saved, manifest: &Manifest, numbers: &mut Numbers) {
    assert_eq!(manifest.entries().unwrap(), saved.entries);
    assert_eq!(manifest.files().unwrap(), saved.files);
    for (file, number) in saved.files.iter().zip(0..) {
        assert_eq!(manifest.file(number).unwrap(), *file);
    }
    for entry in &saved.entries {
        assert_eq!(manifest.entry(&entry.name).unwrap(), *entry);
        let Kind::Tensor { dtype, shape, chunks } = &entry.kind else {
            assert_eq!(manifest.tensor(&entry.name).unwrap_err().code(), Code::NoSuchTensor);
            continue;
        };
        assert_eq!(manifest.tensor(&entry.name).unwrap(), (*dtype, shape.as_slice()));
        for _ in 0..4 {
            let offsets: Vec<u64> = shape.iter().map(|&side| numbers.below(side + 1)).collect();
            let rest = shape.iter().zip(&offsets).map(|(side, offset)| side - offset);
            let sizes = rest.map(|rest| numbers.below(rest + 1)).collect();
            let wanted = Region::new(offsets, sizes).unwrap();
            let meets = |chunk: &&Chunk| chunk.region.intersect(&wanted).is_some();
            let expected: Vec<Chunk> = chunks.iter().filter(meets).cloned().collect();
            assert_eq!(manifest.chunks_for(&entry.name, &wanted).unwrap(), expected, "{wanted}");
        }
    }
}

#[test]
fn everything_that_goes_in_comes_out() {
    let saved = everything();
    let (bytes, seal) = saved.bytes();
    let manifest = open(&bytes, Some(&seal)).unwrap();
    check_against(&saved, &manifest, &mut Numbers(1));
    assert_eq!(check_manifest(&bytes, Some(&seal)), []);
    assert_eq!(manifest.seal(), seal);
    assert_eq!(manifest.info().attempt, ATTEMPT);
    assert_eq!(manifest.info().structure.as_ref().unwrap().len(), 64);
    let of = |name: &str| manifest.entry(name).unwrap().kind;
    assert_eq!(of("model.tied"), of("model.big"));
    assert_eq!(of("own.big"), of("model.big"));
    assert!(manifest.value("missing").is_none());
    assert_eq!(manifest.tensor("missing").unwrap_err().code(), Code::NoSuchTensor);
    let whole = Region::whole(&[1]);
    assert_eq!(manifest.chunks_for("model.big", &whole).unwrap_err().code(), Code::BadSlice);
}

#[test]
fn a_part_alone_round_trips_and_checks_itself() {
    for part in &everything().parts {
        let read = Part::decode(part, "part").unwrap();
        assert_eq!(read.encode().unwrap(), *part);
        for end in 0..part.len() {
            assert_eq!(Part::decode(&part[..end], "part").unwrap_err().code(), Code::Truncated);
        }
    }
}

#[test]
fn a_job_without_structure_and_one_without_anything() {
    let named = Named::tensor("w", Dtype::F32, &[4]);
    let mut job = Job::new(1, 2, Structure::default());
    for rank in 0..2 {
        let region = Region::new(vec![u64::from(rank) * 2], vec![2]).unwrap();
        job.store(rank, &named, Place::Box(region.clone()), &region);
    }
    for saved in [job.finish(), Job::new(1, 3, Structure::default()).finish()] {
        let (bytes, seal) = saved.bytes();
        let manifest = open(&bytes, Some(&seal)).unwrap();
        assert_eq!(manifest.info().structure, None);
        check_against(&saved, &manifest, &mut Numbers(1));
        assert_eq!(check_manifest(&bytes, Some(&seal)), []);
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn random_states_round_trip_and_audit(seed: u64) {
        let saved = random(seed);
        let (bytes, seal) = saved.bytes();
        let manifest = open(&bytes, Some(&seal)).unwrap();
        check_against(&saved, &manifest, &mut Numbers(seed));
        prop_assert_eq!(check_manifest(&bytes, Some(&seal)), []);
    }
}

/// Counts the bytes that are read.
struct Counted {
    inner: MemorySource,
    bytes: Arc<AtomicU64>,
}

impl RangeSource for Counted {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn len(&self) -> u64 {
        self.inner.len()
    }
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        // Short reads, so that these are gone through too.
        let len = into.len().min(10_000);
        let count = self.inner.read_at(&mut into[..len], offset)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// 64 ranks, each with a part of some 5 KiB: a rank that wants its own shards reads the head and its part, once.
#[test]
fn a_restoring_rank_reads_only_the_parts_that_it_needs() {
    let world = 64;
    let meshes = vec![Arc::new(Mesh::new(vec![world]).unwrap())];
    let values = (0..500).map(|number| {
        Named::tensor(format!("layer.{number:03}"), Dtype::F32, &[640, 3]).with_layout(0)
    });
    let structure =
        Structure::new(meshes, vec![layout(&[Placement::Shard(0)])], values.collect()).unwrap();
    let mut job = Job::new(1, world as u32, structure);
    for named in job.structure.clone().values() {
        (0..world as u32).for_each(|rank| job.store_shard(rank, named));
    }
    let saved = job.finish();
    let (bytes, seal) = saved.bytes();
    let head = saved.head().unwrap().bytes.len() as u64;
    let read = Arc::new(AtomicU64::new(0));
    let inner = MemorySource::new("m", bytes.clone());
    let source = Counted { inner, bytes: Arc::clone(&read) };
    let manifest = Manifest::open(Arc::new(source), Some(&seal)).unwrap();
    // One first read of 64 KiB, or all of the head.
    assert!(read.load(Ordering::Relaxed) <= head.max(1 << 16));
    let before = read.load(Ordering::Relaxed);
    for _ in 0..2 {
        for named in manifest.table().values() {
            let wanted = Region::new(vec![170, 0], vec![10, 3]).unwrap();
            let chunks = manifest.chunks_for(&named.name, &wanted).unwrap();
            assert_eq!(chunks.len(), 1);
            assert_eq!(chunks[0].region, wanted);
        }
    }
    let part = saved.parts[17].len() as u64;
    assert_eq!(read.load(Ordering::Relaxed) - before, part);
    assert!(part * 20 < bytes.len() as u64);
}

fn code_of(saved: &Saved) -> Code {
    saved.head().unwrap_err().code()
}

fn row_structure() -> (Structure, Named) {
    let named = Named::tensor("w", Dtype::F32, &[4]).with_layout(0);
    let meshes = vec![Arc::new(Mesh::new(vec![2]).unwrap())];
    let layouts = vec![layout(&[Placement::Shard(0)])];
    (Structure::new(meshes, layouts, vec![named.clone()]).unwrap(), named)
}

#[test]
fn what_is_not_there_or_there_twice_is_never_committed() {
    let job = || {
        let (structure, named) = row_structure();
        (Job::new(3, 2, structure), named)
    };
    let (mut half, named) = job();
    half.store_shard(0, &named);
    let half = half.finish();
    assert_eq!(code_of(&half), Code::Hole);
    assert!(half.head().unwrap_err().place().unwrap().contains("\"w\""));
    assert_eq!(code_of(&job().0.finish()), Code::Hole);
    let (mut twice, named) = job();
    (0..2).for_each(|rank| twice.store_shard(rank, &named));
    twice.store_whole(1, &named);
    assert_eq!(code_of(&twice.finish()), Code::Overlap);
    let (mut shifted, named) = job();
    shifted.store_shard(0, &named);
    let region = Region::new(vec![1], vec![3]).unwrap();
    shifted.store(1, &named, Place::Box(region.clone()), &region);
    assert_eq!(code_of(&shifted.finish()), Code::Overlap);
    let mut objects = Job::new(3, 2, Structure::default());
    (0..2).for_each(|rank| objects.store_whole(rank, &Named::object("o")));
    assert_eq!(code_of(&objects.finish()), Code::Overlap);
    let mut lost = Job::new(3, 2, Structure::default());
    lost.own(0, &Named::object("o"));
    assert_eq!(code_of(&lost.finish()), Code::Hole);
    let mut alias = Job::new(3, 2, Structure::default());
    alias.own(0, &Named::alias("a", "b"));
    // What the manifest must say cannot be put down here either, so the parts are built by hand.
    let mut part = Part::builder(ATTEMPT, 0, 1);
    part.own(Named::alias("a", "b"));
    let saved = Saved { parts: vec![part.finish().unwrap().encode().unwrap()], ..one_rank() };
    assert_eq!(code_of(&saved), Code::StructureMismatch);
}

fn one_rank() -> Saved {
    Job::new(3, 1, Structure::default()).finish()
}

#[test]
fn ranks_that_disagree_fail_the_attempt() {
    let (structure, named) = row_structure();
    let mut job = Job::new(3, 2, structure);
    (0..2).for_each(|rank| job.store_shard(rank, &named));
    let good = job.finish();
    good.head().unwrap();
    let with = |rank: usize, part: Part| {
        let mut parts = good.parts.clone();
        parts[rank] = part.encode().unwrap();
        let (info, structure) = (good.info.clone(), Arc::clone(&good.structure));
        Saved { info, structure, parts, files: Vec::new(), entries: Vec::new() }
    };
    let empty = |attempt: &str, rank, world| Part::builder(attempt, rank, world);
    let code = |part: Part| code_of(&with(1, part));
    assert_eq!(code(empty(ATTEMPT, 1, 3).finish().unwrap()), Code::StructureMismatch);
    assert_eq!(code(empty("other", 1, 2).finish().unwrap()), Code::InvalidMetadata);
    assert_eq!(code(empty(ATTEMPT, 0, 2).finish().unwrap()), Code::InvalidMetadata);
    let mut other = empty(ATTEMPT, 1, 2);
    other.structure([1; 32], 1);
    assert_eq!(code(other.finish().unwrap()), Code::StructureMismatch);
    let mut shadow = empty(ATTEMPT, 1, 2);
    shadow.own(Named::object("w"));
    assert_eq!(code(shadow.finish().unwrap()), Code::StructureMismatch);
    let mut same_file = empty(ATTEMPT, 1, 2);
    let name = format!("{ATTEMPT}_0_0.distcp");
    same_file.file(PartFile { name, bytes: 0, crc: None });
    assert_eq!(code(same_file.finish().unwrap()), Code::InvalidMetadata);
    let short = Saved {
        parts: good.parts[..1].to_vec(),
        ..with(0, empty(ATTEMPT, 0, 2).finish().unwrap())
    };
    assert_eq!(code_of(&short), Code::InvalidMetadata);
    let mut shapes = Job::new(3, 2, Structure::default());
    shapes.own(0, &Named::tensor("x", Dtype::F32, &[0]));
    shapes.own(1, &Named::tensor("x", Dtype::F32, &[0, 1]));
    assert_eq!(code_of(&shapes.finish()), Code::StructureMismatch);
}

#[test]
fn parts_that_contradict_themselves_are_not_made() {
    let item = |offset, length, data_offset, data_bytes| ItemPlace {
        file: 0,
        offset,
        length,
        data_offset,
        data_bytes,
    };
    let good = item(0, 20, 4, 16);
    let code = |name: &str, items: &[ItemPlace], value, crcs: &[u32]| {
        let mut part = Part::builder(ATTEMPT, 0, 1);
        part.file(PartFile { name: name.into(), bytes: 100, crc: None });
        part.own(Named::tensor("w", Dtype::F32, &[4]));
        items.iter().for_each(|&item| part.chunk(value, Place::Whole, item, crcs));
        part.finish().err().map(|error| error.code())
    };
    let own = ValueRef::Own(0);
    assert_eq!(code("a", &[good], own, &[1]), None);
    for name in ["", "..", ".a", "a/b", "/a", "a\nb", "a\\b", &"a".repeat(256)] {
        assert_eq!(code(name, &[good], own, &[1]), Some(Code::UnsafePath), "{name:?}");
    }
    let bad = Some(Code::InvalidMetadata);
    assert_eq!(code("a", &[good], own, &[]), bad);
    assert_eq!(code("a", &[good], own, &[1, 2]), bad);
    assert_eq!(code("a", &[good], ValueRef::Own(1), &[1]), bad);
    assert_eq!(code("a", &[good], ValueRef::Shared(0), &[1]), bad);
    assert_eq!(code("a", &[item(4, 20, 0, 16)], own, &[1]), bad);
    assert_eq!(code("a", &[item(0, 20, 8, 16)], own, &[1]), bad);
    assert_eq!(code("a", &[item(u64::MAX, 20, u64::MAX, 16)], own, &[1]), bad);
    assert_eq!(code("a", &[item(90, 20, 90, 16)], own, &[1]), Some(Code::OutOfBounds));
    assert_eq!(code("a", &[good, item(19, 20, 19, 16)], own, &[1]), Some(Code::OffsetOverlap));
    assert_eq!(code("a", &[item(30, 20, 30, 16), good], own, &[1]), None);
}

#[test]
fn chunks_that_do_not_fit_their_tensor_are_refused() {
    let of = |named: Named, place: Place, bytes: u64| {
        let mut part = Part::builder(ATTEMPT, 0, 1);
        part.file(PartFile { name: "a".into(), bytes, crc: None });
        let value = ValueRef::Own(part.own(named));
        let item =
            ItemPlace { file: 0, offset: 0, length: bytes, data_offset: 0, data_bytes: bytes };
        part.chunk(value, place, item, &vec![0; bytes.div_ceil(1 << 20) as usize]);
        let parts = vec![part.finish().unwrap().encode().unwrap()];
        Saved { parts, ..one_rank() }.head().err().map(|error| error.code())
    };
    let w = || Named::tensor("w", Dtype::F32, &[4]);
    let region = |offset, size| Place::Box(Region { offsets: vec![offset], sizes: vec![size] });
    assert_eq!(of(w(), Place::Whole, 16), None);
    let bad = Some(Code::InvalidMetadata);
    assert_eq!(of(w(), Place::Whole, 15), bad);
    assert_eq!(of(w(), Place::Implied, 16), bad);
    assert_eq!(of(w(), region(1, 4), 16), bad);
    assert_eq!(of(w(), region(u64::MAX, 4), 16), bad);
    assert_eq!(of(w(), Place::Box(Region { offsets: vec![], sizes: vec![] }), 4), bad);
    assert_eq!(of(Named::alias("a", "b"), Place::Whole, 4), bad);
    assert_eq!(of(Named::object("o"), region(0, 1), 4), bad);
}

#[test]
fn names_of_every_kind_come_back() {
    let names =
        ["", "a", "a.b", "a.b.", "ä", "ñandú", "a\0b", "\u{10FFFF}", "a/b", &"x".repeat(65_536)];
    let mut job = Job::new(5, 1, Structure::default());
    for name in names {
        job.store_whole(0, &Named::object(name));
    }
    let saved = job.finish();
    let (bytes, seal) = saved.bytes();
    let manifest = open(&bytes, Some(&seal)).unwrap();
    check_against(&saved, &manifest, &mut Numbers(1));
    assert_eq!(check_manifest(&bytes, Some(&seal)), []);
    let long = Named::object("x".repeat(65_537));
    let mut part = Part::builder(ATTEMPT, 0, 1);
    part.own(long);
    assert_eq!(part.finish().unwrap_err().code(), Code::InvalidMetadata);
}

/// A committer that takes over must come to the same bytes.
#[test]
fn the_same_parts_give_the_same_manifest() {
    let saved = everything();
    assert_eq!(saved.bytes(), saved.bytes());
    let first: Vec<Entry> = saved.entries.clone();
    assert_eq!(first, everything().entries);
    let _ = Builder::new(saved.info.clone(), Arc::clone(&saved.structure));
    assert!(matches!(saved.structure.find("model.tied").unwrap().1.value, Value::Alias { .. }));
}
