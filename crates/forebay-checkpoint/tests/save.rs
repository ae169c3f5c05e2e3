//! Saves of several ranks, end to end, on a real file system.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod save_support;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use forebay_checkpoint::commit::Root;
use forebay_checkpoint::manifest::Manifest;
use forebay_checkpoint::model::Kind;
use forebay_checkpoint::open::{Checkpoint, Origin, verify_folder};
use forebay_checkpoint::progress::Unwatched;
use forebay_checkpoint::save::Seal;
use forebay_engine::LocalFile;
use forebay_error::Code;
use forebay_format::OpenFile;
use forebay_format::dcp::metadata::{DcpMetadata, EntryKind};
use forebay_format::torch_zip::Archive;
use forebay_tensor::Region;

use save_support::{Rank, bytes, root};

/// Row shards of a large tensor, many small ones, empty and 0-d ones, objects.
fn rank_of(number: u64, world: u64, seed: u64) -> Rank {
    let mut rank = Rank::new();
    let shape = [1001, 1500];
    let region = Region::shard(&shape, 0, number, world).unwrap();
    rank.tensor("model.large", &shape, region, seed + number);
    for small in 0..200 {
        let whole = Region::whole(&[small, 3]);
        rank.tensor(&format!("r{number}.small{small}"), &[small, 3], whole, seed + 1000 + small);
    }
    rank.tensor(&format!("r{number}.scalar"), &[], Region::whole(&[]), seed + 7);
    rank.object(&format!("object{number}"), b"\x80\x02K\x2a.");
    rank
}

fn save(
    root: &Root,
    number: u32,
    world: u32,
    save_number: u32,
    seed: u64,
) -> forebay_error::Result<()> {
    let rank = rank_of(number.into(), world.into(), seed);
    save_support::save(root, rank, (number, world), save_number)
}

fn save_all(root: &Root, world: u32, number: u32, seed: u64) {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| scope.spawn(move || save(root, rank, world, number, seed)))
            .collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
    });
}

fn manifest(folder: &Path) -> Manifest {
    let open = |name: &str| {
        Arc::new(LocalFile::new(Arc::new(OpenFile::open(&folder.join(name)).unwrap())).unwrap())
    };
    let seal = Seal::find(open(".metadata").as_ref()).unwrap().unwrap();
    Manifest::open(open(&seal.manifest), Some(&seal.hash)).unwrap()
}

/// By what a stock reader goes by: `.metadata`, and the archives with their CRCs. No manifest is read.
fn check_as_stock(folder: &Path, world: u64, seed: u64) {
    let metadata = DcpMetadata::read(&std::fs::read(folder.join(".metadata")).unwrap()).unwrap();
    let (mut items, mut large) = (0, BTreeMap::new());
    for entry in metadata.entries() {
        let places: Vec<_> = match &entry.kind {
            EntryKind::Object { place } => vec![(None, *place)],
            EntryKind::Tensor { chunks, .. } => {
                chunks.clone().map(|chunk| (Some(chunk.region()), chunk.place.unwrap())).collect()
            }
        };
        for (region, place) in places {
            let file = OpenFile::open(&folder.join(&metadata.files()[place.file])).unwrap();
            let archive = Archive::open(&file, place.offset, place.length).unwrap();
            archive.check_all_crcs().unwrap();
            items += 1;
            let name = if region.is_some() { "data/0" } else { "data.pkl" };
            let Some(record) = archive.record(name).unwrap() else {
                assert!(region.unwrap().is_empty(), "{}", entry.name);
                continue;
            };
            let data = archive.read(&record, u64::MAX).unwrap();
            match (entry.name, region) {
                ("model.large", Some(region)) => drop(large.insert(region.offsets[0], data)),
                (name, Some(_)) if name.starts_with("r0.small") => {
                    let small: u64 = name["r0.small".len()..].parse().unwrap();
                    assert_eq!(data, bytes(seed + 1000 + small, small * 3 * 4), "{name}");
                }
                (_, Some(_)) => {}
                (name, None) => assert_eq!(data, b"\x80\x02K\x2a.", "{name}"),
            }
        }
    }
    // Each rank: a shard, 200 small ones, a scalar, an object.
    assert_eq!(items, 203 * world);
    assert_eq!(large.len() as u64, world);
    assert!(large.into_values().flatten().eq(large_of(world, seed)));
}

/// All rows of the large tensor.
fn large_of(world: u64, seed: u64) -> Vec<u8> {
    let shard = |number| {
        let region = Region::shard(&[1001, 1500], 0, number, world).unwrap();
        bytes(seed + number, region.elements() * 4)
    };
    (0..world).flat_map(shard).collect()
}

/// By the manifest, as we open it; and every byte of every file.
fn check_opened(folder: &Path, world: u64, seed: u64) {
    let own = Checkpoint::open(folder).unwrap();
    assert!(matches!(own.origin, Origin::Forebay(_)), "{:?}", own.origin);
    let whole = own.read_tensor(own.get("model.large").unwrap()).unwrap();
    assert!(whole == large_of(world, seed));
    for small in 0..200 {
        let entry = own.get(&format!("r0.small{small}")).unwrap();
        let wanted = bytes(seed + 1000 + small, small * 3 * 4);
        assert_eq!(own.read_tensor(entry).unwrap(), wanted, "small {small}");
    }
    let verified = verify_folder(folder, &Unwatched).unwrap();
    assert!(verified.is_sound(), "{:?}", verified.faults);
    assert_eq!(verified.unchecked_bytes, 0);
}

fn check(folder: &Path, world: u64, seed: u64) {
    check_as_stock(folder, world, seed);
    check_opened(folder, world, seed);
    // By the manifest, block by block.
    let manifest = manifest(folder);
    let files = manifest.files().unwrap();
    let mut blocks = 0;
    for entry in manifest.entries().unwrap() {
        for chunk in entry.chunks() {
            let data = chunk.data.as_ref().unwrap();
            let file = std::fs::read(folder.join(&files[chunk.file as usize].name)).unwrap();
            let own = &file[data.offset as usize..][..data.bytes as usize];
            let crcs: Vec<u32> = own.chunks(1 << 20).map(forebay_format::crc::crc32).collect();
            assert_eq!(crcs, data.crcs, "{}", entry.name);
            blocks += crcs.len();
            if matches!(entry.kind, Kind::Tensor { .. }) && data.bytes >= 64 << 10 {
                assert_eq!(data.offset % 4096, 0);
            }
        }
    }
    assert!(blocks > 200);
    for number in 0..world as u32 {
        for file in manifest.part_files(number).unwrap() {
            let bytes = std::fs::read(folder.join(&file.name)).unwrap();
            assert_eq!(file.crc, Some(forebay_format::crc::crc32(&bytes)), "{}", file.name);
        }
    }
    let bytes = std::fs::read(folder.join(manifest_name(folder))).unwrap();
    let findings = forebay_checkpoint::audit::check_manifest(&bytes, Some(&manifest.seal()));
    assert!(findings.is_empty(), "{findings:?}");
}

fn manifest_name(folder: &Path) -> String {
    let open = OpenFile::open(&folder.join(".metadata")).unwrap();
    let source = LocalFile::new(Arc::new(open)).unwrap();
    Seal::find(&source).unwrap().unwrap().manifest
}

#[test]
fn ranks_save_a_step_that_stock_readers_and_we_can_read() {
    for world in [1, 2, 4] {
        let folder = tempfile::tempdir().unwrap();
        let root = root(folder.path());
        save_all(&root, world, 1, 5);
        check(&folder.path().join("step-7"), world.into(), 5);
        // And over it again: the new one counts.
        save_all(&root, world, 2, 6);
        check(&folder.path().join("step-7"), world.into(), 6);
    }
}

#[test]
fn a_rank_that_cannot_write_fails_the_save_on_all_and_the_old_step_stays() {
    let folder = tempfile::tempdir().unwrap();
    let root = root(folder.path());
    save_all(&root, 2, 1, 5);
    // The data file of rank 1 is there already: it cannot be created.
    let step = folder.path().join("step-7");
    std::fs::write(step.join("00000abc-2_1_0.distcp"), b"in the way").unwrap();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| save(&root, 0, 2, 2, 6).unwrap_err());
        let one = scope.spawn(|| save(&root, 1, 2, 2, 6).unwrap_err());
        let (zero, one) = (zero.join().unwrap(), one.join().unwrap());
        assert_eq!(one.code(), Code::AlreadyExists, "{one}");
        assert_eq!(zero.code(), Code::AlreadyExists, "{zero}");
        println!("{}\n{}", zero.render(), one.render());
    });
    check(&step, 2, 5);
}

#[test]
fn verify_tells_of_objects_that_a_restore_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let root = root(folder.path());
    let mut rank = Rank::new();
    // Text of 2 MiB: an item of several blocks.
    let long = |end: &[u8]| [b"\x80\x02X\0\0\x20\0", vec![b'x'; 2 << 20].as_slice(), end].concat();
    rank.object("good", b"\x80\x02K\x05.");
    rank.object("good_long", &long(b"."));
    // A value that is kept as number 2^27; a tuple of nothing.
    rank.object("memo", b"\x80\x02Nr\x00\x00\x00\x08.");
    rank.object("long", &long(b"\x85\x85R."));
    save_support::save(&root, rank, (0, 1), 1).unwrap();
    let step = folder.path().join("step-7");
    let verified = verify_folder(&step, &Unwatched).unwrap();
    let mut faults: Vec<_> =
        verified.faults.iter().map(|f| (f.name.as_deref(), &f.error)).collect();
    faults.sort_by_key(|(name, _)| *name);
    let told: Vec<_> = faults.iter().map(|(name, error)| (name.unwrap(), error.code())).collect();
    assert_eq!(told, [("long", Code::InvalidItem), ("memo", Code::InvalidItem)], "{faults:?}");
    assert!(verified.faults.iter().all(|fault| fault.file.ends_with(".distcp")));
    // As torch's is verified: item by item.
    let verdict = Checkpoint::open(&step).unwrap().verify(|_| Ok(())).unwrap();
    let mut told: Vec<_> = verdict.faults.iter().map(|fault| fault.name.as_str()).collect();
    told.sort_unstable();
    assert_eq!(told, ["long", "memo"]);
}

#[test]
fn verify_tells_of_a_damaged_object_once_whichever_block_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let root = root(folder.path());
    let mut rank = Rank::new();
    let text = |byte: u8| vec![byte; 5 << 20];
    let pickle = |byte: u8| [b"\x80\x02X\0\0\x50\0", text(byte).as_slice(), b"."].concat();
    rank.object("a", &pickle(b'a'));
    rank.object("b", &pickle(b'b'));
    save_support::save(&root, rank, (0, 1), 1).unwrap();
    let step = folder.path().join("step-7");
    let path = step.join("00000abc-1_0_0.distcp");
    let good = std::fs::read(&path).unwrap();
    let start = good.windows(9).position(|run| run == b"bbbbbbbbb").unwrap();
    for mebibyte in 0..5 {
        let mut bad = good.clone();
        bad[start + (mebibyte << 20)] ^= 1;
        std::fs::write(&path, bad).unwrap();
        let verified = verify_folder(&step, &Unwatched).unwrap();
        let faults: Vec<_> = verified.faults.iter().map(|f| (&f.name, f.error.code())).collect();
        assert_eq!(faults, [(&Some("b".to_owned()), Code::Checksum)], "{mebibyte}");
    }
}
