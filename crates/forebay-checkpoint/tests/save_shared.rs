//! Saves of ranks that agreed on a structure: what their manifest has, what restores read of it, and what becomes of
//! layouts that are not so. **unsafe**: memory is given by address.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod shared_job;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_checkpoint::audit::check_manifest;
use forebay_checkpoint::manifest::{Manifest, Named, Part, Place, Structure, ValueRef};
use forebay_checkpoint::open::{Checkpoint, verify_folder};
use forebay_checkpoint::progress::Unwatched;
use forebay_checkpoint::restore::Reader;
use forebay_engine::RangeSource;
use forebay_error::{Code, Result};
use forebay_tensor::{Dtype, Placement, Region};
use shared_job::{Job, bytes_of, fill, layout, mesh, read_region};

/// A source that counts the bytes that are read of it.
struct Counted {
    inner: Arc<dyn RangeSource>,
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
        let count = self.inner.read_at(into, offset)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// 64 ranks, 200 tensors that are cut over all of them, an object.
fn large(folder: &Path) -> Job {
    let values = (0..200).map(|number| {
        Named::tensor(format!("model.layers.{number:03}.weight"), Dtype::F32, &[640, 3])
            .with_layout(0)
    });
    let values = values.chain([Named::object("step")]).collect();
    let structure =
        Structure::new(vec![mesh(&[64])], vec![layout(0, &[Placement::Shard(0)])], values).unwrap();
    Job::save(folder, structure, 64, |_, _, regions| regions)
}

fn open(job: &Job) -> (Reader, Arc<AtomicU64>) {
    let bytes = Arc::new(AtomicU64::new(0));
    let source = Counted { inner: job.manifest_source(), bytes: bytes.clone() };
    let manifest = Manifest::open(Arc::new(source), Some(&job.seal.hash)).unwrap();
    (Reader::of_manifest(&job.folder, manifest).unwrap(), bytes)
}

/// What a rank of `world` wants of all tensors, and that it gets it.
fn restore(reader: &Reader, rank: u64, world: u64) {
    let tensors = reader.items().iter().enumerate();
    let wants: Vec<(usize, Region)> = tensors
        .filter_map(|(number, item)| {
            let (_, shape) = item.tensor.as_ref()?;
            Some((number, Region::shard(shape, 0, rank, world).unwrap()))
        })
        .collect();
    let filled = read_region(reader, &wants).unwrap();
    for ((number, region), got) in wants.iter().zip(filled) {
        let item = &reader.items()[*number];
        let (dtype, shape) = item.tensor.as_ref().unwrap();
        let name = if item.name == "tied" { "plain" } else { &item.name };
        assert_eq!(got, bytes_of(name, *dtype, shape, region), "{} {region}", item.name);
    }
}

#[test]
fn a_rank_reads_of_the_manifest_what_it_needs_for_what_it_wants() {
    let folder = tempfile::tempdir().unwrap();
    let job = large(folder.path());
    let total = job.manifest.len() as u64;
    let (reader, read) = open(&job);
    restore(&reader, 17, 64);
    let one = read.load(Ordering::Relaxed);
    assert!(one * 10 < total, "{one} of {total} bytes were read");
    // On half of the ranks, two parts; what was read before is not read again.
    restore(&reader, 8, 32);
    assert!(read.load(Ordering::Relaxed) - one < total / 32);
    let before = read.load(Ordering::Relaxed);
    restore(&reader, 17, 64);
    assert_eq!(reader.object_bytes("step").unwrap().len(), job.object_bytes());
    assert!(reader.regions("model.layers.000.weight").unwrap().len() == 64);
    // The object is in the part of rank 0.
    assert!(read.load(Ordering::Relaxed) - before < total / 32);
    // All of it: no byte twice.
    restore(&reader, 0, 1);
    assert!(read.load(Ordering::Relaxed) <= total);
    assert_eq!(Reader::open(&job.folder).unwrap().items(), reader.items());
}

#[test]
fn parts_have_no_names_and_no_regions_and_everybody_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let job = large(folder.path());
    for bytes in &job.parts {
        let part = Part::decode(bytes, "part").unwrap();
        assert!(part.own().is_empty());
        let tensors = part.chunks().iter().filter(|chunk| chunk.place == Place::Implied).count();
        assert_eq!(tensors, 200);
        assert!(part.chunks().iter().all(|chunk| matches!(chunk.value, ValueRef::Shared(_))));
    }
    // Some 13 bytes a chunk, and what files and the part itself take.
    let per_part = job.parts.iter().map(Vec::len).max().unwrap();
    assert!(per_part < 200 * 14 + 400, "{per_part}");
    assert_eq!(check_manifest(&job.manifest, Some(&job.seal.hash)), []);
    let checkpoint = Checkpoint::open(&job.folder).unwrap();
    let entry = checkpoint.get("model.layers.123.weight").unwrap();
    let whole = Region::whole(&[640, 3]);
    let wanted = bytes_of(&entry.name, Dtype::F32, &[640, 3], &whole);
    assert_eq!(checkpoint.read_tensor(entry).unwrap(), wanted);
    let verified = verify_folder(&job.folder, &Unwatched).unwrap();
    assert!(verified.is_sound(), "{:?}", verified.faults);
}

#[test]
fn damage_is_found_where_it_is_read_and_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    let job = large(folder.path());
    let parts = job.manifest.len() - job.parts.iter().map(Vec::len).sum::<usize>();
    let seventeenth = parts + job.parts[..17].iter().map(Vec::len).sum::<usize>();
    let path = job.folder.join(&job.seal.manifest);
    let damage = |at: usize| {
        let mut bytes = job.manifest.clone();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    };
    damage(seventeenth + job.parts[17].len() / 2);
    let (reader, _) = open(&job);
    restore(&reader, 16, 64);
    restore(&reader, 18, 64);
    let region = Region::new(vec![170, 0], vec![1, 3]).unwrap();
    assert_eq!(reader.select(&[(0, region)]).err().unwrap().code(), Code::Checksum);
    // Everything before the parts is under the hash in `.metadata`.
    for at in (0..parts).step_by(97) {
        damage(at);
        assert!(Reader::open(&job.folder).is_err(), "byte {at}");
    }
    damage(0);
    std::fs::write(&path, &job.manifest).unwrap();
    restore(&Reader::open(&job.folder).unwrap(), 17, 64);
}

/// Layouts of every kind, one that does not say what ranks hold, and a rank that holds more than its own.
#[test]
fn what_a_layout_does_not_give_is_named_and_the_rest_is_not() {
    use Placement::{Replicate, Shard, StridedShard};
    let meshes = vec![mesh(&[4]), mesh(&[2, 2])];
    let strided = StridedShard { dim: 0, split_factor: 2 };
    let layouts = vec![
        layout(0, &[Shard(0)]),
        layout(1, &[Shard(1), Shard(0)]),
        layout(1, &[Replicate, Shard(0)]),
        layout(1, &[strided, Shard(0)]),
        forebay_checkpoint::manifest::Layout {
            right_to_left: true,
            ..layout(1, &[strided, Shard(0)])
        },
    ];
    let tensor = |name: &str, shape: &[u64], layout| {
        Named::tensor(name, Dtype::F32, shape).with_layout(layout)
    };
    let values = vec![
        tensor("rows", &[7, 3], 0),
        tensor("blocks", &[5, 5], 1),
        tensor("hybrid", &[6, 2], 2),
        tensor("strided", &[9, 2], 3),
        tensor("fsdp", &[9, 2], 4),
        tensor("lies", &[8, 2], 0),
        tensor("swapped", &[8, 2], 0),
        tensor("two", &[3], 0),
        Named::tensor("plain", Dtype::F32, &[3]),
        Named::alias("tied", "plain"),
        Named::object("step"),
    ];
    let structure = Structure::new(meshes, layouts, values).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let rows = |offset, size| Region::new(vec![offset, 0], vec![size, 2]).unwrap();
    let job = Job::save(folder.path(), structure, 4, |name, rank, regions| match (name, rank) {
        // The ranks hold 3, 1, 2, 2 rows, the layout says two each.
        ("lies", 0) => vec![rows(0, 3)],
        ("lies", 1) => vec![rows(3, 1)],
        // Two ranks have changed places.
        ("swapped", 1) => vec![rows(4, 2)],
        ("swapped", 2) => vec![rows(2, 2)],
        // Held by two, one writes.
        ("hybrid", rank) if rank >= 2 => Vec::new(),
        _ => regions,
    });
    let named = |place: &Place| matches!(place, Place::Box(_));
    for (rank, wanted) in [(0, vec!["lies"]), (1, vec!["lies", "swapped"]), (2, vec!["swapped"])] {
        let part = Part::decode(&job.parts[rank], "part").unwrap();
        let boxes = part.chunks().iter().filter(|chunk| named(&chunk.place));
        let names: Vec<&str> = boxes.map(|chunk| job.name(chunk.value)).collect();
        assert_eq!(names, wanted, "rank {rank}");
    }
    assert_eq!(check_manifest(&job.manifest, Some(&job.seal.hash)), []);
    let verified = verify_folder(&job.folder, &Unwatched).unwrap();
    assert!(verified.is_sound(), "{:?}", verified.faults);
    let (reader, _) = open(&job);
    for world in [1, 2, 3, 5] {
        (0..world).for_each(|rank| restore(&reader, rank, world));
    }
    let stored: u64 = reader.regions("lies").unwrap().iter().map(Region::elements).sum();
    assert_eq!(stored, 16);
}

/// Ranks that hold one thing twice, or leave something out, are found whatever the layout says.
#[test]
fn a_layout_hides_no_hole_and_no_overlap() {
    let make = |change: fn(u32) -> bool, region: Option<Region>| {
        let values = vec![Named::tensor("w", Dtype::F32, &[8, 2]).with_layout(0)];
        let layouts = vec![layout(0, &[Placement::Shard(0)])];
        let structure = Structure::new(vec![mesh(&[4])], layouts, values).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let parts = Job::parts_of(folder.path(), &structure.into(), 4, |_, rank, regions| {
            match change(rank) {
                true => region.clone().into_iter().collect(),
                false => regions,
            }
        });
        Job::assemble(&parts.0, &parts.1).err().map(|error| error.code())
    };
    let rows = |offset| Some(Region::new(vec![offset, 0], vec![2, 2]).unwrap());
    assert_eq!(make(|_| false, None), None);
    assert_eq!(make(|rank| rank == 2, None), Some(Code::Hole));
    assert_eq!(make(|rank| rank == 2, rows(2)), Some(Code::Overlap));
    assert_eq!(make(|rank| rank == 2, rows(3)), Some(Code::Overlap));
}

#[test]
fn items_are_what_the_structure_says() {
    let values = vec![Named::tensor("w", Dtype::F32, &[8, 2]), Named::object("o")];
    let structure = Arc::new(Structure::new(Vec::new(), Vec::new(), values).unwrap());
    let mismatch = |name: &str, shape: &[u64]| {
        let plan = fill(name, Dtype::F32, shape, Region::whole(shape));
        plan.with_structure(structure.clone(), 0).err().map(|error| error.code())
    };
    assert_eq!(mismatch("w", &[8, 2]), None);
    assert_eq!(mismatch("another", &[1]), None);
    assert_eq!(mismatch("w", &[8, 3]), Some(Code::StructureMismatch));
    assert_eq!(mismatch("o", &[1]), Some(Code::StructureMismatch));
}

/// A step of two ranks from before parts referred to a structure (`tests/old`): a tensor cut over both, one that one of
/// them wrote, a tie, an object, values of each rank, a side file.
#[test]
fn manifests_that_name_every_region_are_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/old/step-1");
    let reader = Reader::open(&folder).unwrap();
    let number = |name: &str| reader.items().iter().position(|item| item.name == name).unwrap();
    let f32s = |from: u32, to: u32| -> Vec<u8> {
        (from..to).flat_map(|value| (value as f32).to_le_bytes()).collect()
    };
    for (name, rows) in [("model.w", 2), ("model.tied", 7)] {
        let region = Region::new(vec![7 - rows, 0], vec![rows, 5]).unwrap();
        let got = read_region(&reader, &[(number(name), region)]).unwrap();
        assert_eq!(got, [f32s(35 - 5 * rows as u32, 35)], "{name}");
    }
    assert_eq!(reader.side_files().unwrap(), ["notes"]);
    assert_eq!(reader.side_file("notes").unwrap(), b"old");
    assert_eq!(reader.object_json("step").unwrap(), "3");
    assert_eq!(reader.object_json("per_rank/1/seed").unwrap(), "1");
    assert_eq!(reader.warnings(), &[] as &[String]);
    let verified = verify_folder(&folder, &Unwatched).unwrap();
    assert!(verified.is_sound(), "{:?}", verified.faults);
}
