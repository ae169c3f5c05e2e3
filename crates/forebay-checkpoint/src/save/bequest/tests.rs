//! Round trips, and bytes that are not what was written.

use std::sync::Arc;

use forebay_tensor::{Dtype, Mesh, Placement, Region};
use proptest::prelude::*;

use super::*;
use crate::commit::{AttemptId, Policy, Root, RunId, StructureHash, SystemClock};
use crate::manifest::wire::{CRC_END, HEAD_BYTES};
use crate::manifest::{Layout, Named, Structure};
use crate::model::PathStep;
use crate::save::{Commit, OurMetadata, SaveItem};
use forebay_format::crc::crc32;

const BYTES: u64 = 4096;

fn item(name: &str, what: What, writes: bool) -> SaveItem {
    let path = name.split('.').map(|key| PathStep::Key(key.to_owned())).collect();
    SaveItem { name: name.to_owned(), path, what, writes }
}

fn rows(from: u64, to: u64) -> What {
    let region = Region::new(vec![from, 0], vec![to - from, 4]).unwrap();
    What::Tensor { dtype: Dtype::F32, shape: vec![8, 4], region, requires_grad: false }
}

/// Cut and whole tensors, objects, aliases, one that another rank writes; some of it agreed on.
fn request() -> Request {
    let mesh = Arc::new(Mesh::new(vec![2]).unwrap());
    let placements = vec![Placement::Shard(0)];
    let layout = Layout { mesh: 0, placements, right_to_left: false };
    let path = |name: &str| vec![PathStep::Key(name.to_owned())];
    let values = vec![
        Named::tensor("w", Dtype::F32, &[8, 4]).with_layout(0).with_path(path("w")),
        Named::object("lr").with_path(path("lr")),
        Named::alias("tied", "w").with_path(path("tied")),
    ];
    let structure = Structure::new(vec![mesh], vec![layout], values).unwrap();
    let half = Region::whole(&[3]);
    let own =
        What::Tensor { dtype: Dtype::BF16, shape: vec![3], region: half, requires_grad: true };
    let items = vec![
        item("w", rows(4, 8), true),
        item("lr", What::Object, false),
        item("tied", What::Alias { of: "w".to_owned() }, true),
        item("own.1", own, true),
        item("own.rng", What::Object, true),
        item("own.data", What::Object, true),
    ];
    let plan = SavePlan::new(items).unwrap().with_structure(Arc::new(structure), 1).unwrap();
    let attempt = AttemptId { run: RunId(0xc0ffee), save: 3 };
    let spec = Spec {
        folder: "step-12".to_owned(),
        step: 12,
        attempt,
        rank: 1,
        world: 2,
        structure: StructureHash([7; 32]),
        epoch: 4,
        parent: Some(11),
        part_bytes: 1 << 16,
        who: "rank 1".to_owned(),
    };
    let info = Info { attempt: attempt.to_string(), step: 12, world_size: 2, ..Info::default() };
    Request {
        plan: Arc::new(plan),
        root: Root {
            store: Arc::new(forebay_store::MemoryStore::new()),
            clock: Arc::new(SystemClock::default()),
            identify: Arc::new(OurMetadata),
        },
        policy: Policy { overwrite: false, ..Policy::default() },
        hints: None,
        spec,
        info,
        side_files: vec![SideFile { name: "notes.txt".to_owned(), bytes: b"hello".to_vec() }],
        files: 3,
        writers: None,
        stream: None,
        in_place: false,
        commit: Commit::Protocol,
    }
}

fn objects() -> Vec<Object> {
    vec![Object::Pickle(b"\x80\x02N.".to_vec()), Object::Archive(vec![9; 300])]
}

fn encoded() -> Vec<u8> {
    Bequest::encode(&request(), &objects(), &[512, 0], BYTES).unwrap()
}

/// With the length and checksum that go with these bytes.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let len = bytes.len() as u64;
    bytes[CRC_END..HEAD_BYTES].copy_from_slice(&len.to_le_bytes());
    let crc = crc32(&bytes[CRC_END..]);
    bytes[CRC_END - 4..CRC_END].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
fn a_bequest_says_all_that_a_save_needs() {
    let request = request();
    let found = Bequest::decode(&encoded(), BYTES, "here").unwrap();
    assert_eq!(format!("{:?}", found.spec), format!("{:?}", request.spec));
    assert_eq!(found.info, request.info);
    assert_eq!((found.files, found.overwrite), (3, false));
    assert_eq!(found.offsets, [512, 0]);
    assert_eq!(format!("{:?}", found.objects), format!("{:?}", objects()));
    assert_eq!(format!("{:?}", found.side_files), format!("{:?}", request.side_files));
    assert_eq!(found.plan.structure(), request.plan.structure());
    let written: Vec<_> = request.plan.items().iter().filter(|item| item.writes).collect();
    assert_eq!(found.plan.items().iter().collect::<Vec<_>>(), written);
    let archives = [vec![0; 10], vec![0; 20]];
    let specs = |plan: &SavePlan| format!("{:?}", plan.specs(&archives));
    assert_eq!(specs(&found.plan), specs(&request.plan));
}

#[test]
fn places_outside_of_the_memory_are_refused_on_both_sides() {
    // 64 bytes of `w`, 6 of `own.1`.
    let last = [BYTES - 64, BYTES - 6];
    let bytes = Bequest::encode(&request(), &objects(), &last, BYTES).unwrap();
    Bequest::decode(&bytes, BYTES, "here").unwrap();
    assert_eq!(Bequest::decode(&bytes, BYTES - 1, "here").unwrap_err().code(), Code::Usage);
    for bad in [&[BYTES - 63, 0][..], &[0, BYTES - 5], &[u64::MAX - 1, 0], &[0], &[0, 0, 0]] {
        let error = Bequest::encode(&request(), &objects(), bad, BYTES).unwrap_err();
        assert_eq!(error.code(), Code::Usage, "{bad:?}");
    }
    // Beside one another they have no room: a tensor may be named often.
    let error = Bequest::encode(&request(), &objects(), &[0, 0], 64).unwrap_err();
    assert!(error.what().contains("70 bytes of tensors in 64"), "{error}");
    let error = Bequest::encode(&request(), &objects()[1..], &[0, 0], BYTES).unwrap_err();
    assert_eq!(error.code(), Code::Usage);
}

#[test]
fn what_was_cut_or_flipped_is_an_error() {
    let whole = encoded();
    for len in 0..whole.len() {
        assert!(Bequest::decode(&whole[..len], BYTES, "here").is_err(), "{len}");
        // The same, with a checksum that says that it is so.
        if len >= HEAD_BYTES {
            assert!(Bequest::decode(&sealed(whole[..len].to_vec()), BYTES, "").is_err(), "{len}");
        }
    }
    for at in 0..whole.len() * 8 {
        let mut bad = whole.clone();
        bad[at / 8] ^= 1 << (at % 8);
        // The minor version may be any.
        if !(80..96).contains(&at) {
            assert!(Bequest::decode(&bad, BYTES, "here").is_err(), "bit {at}");
        }
    }
}

proptest! {
    /// With right checksums: whatever is read lies inside of the memory.
    #[test]
    fn hostile_bytes_end_in_an_error_or_in_something_that_fits(
        changes in prop::collection::vec((0..2000_usize, any::<u8>()), 1..6),
        cut in prop::option::of(0..2000_usize),
    ) {
        let mut bytes = encoded();
        for (at, value) in changes {
            let at = HEAD_BYTES + at % (bytes.len() - HEAD_BYTES);
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            let len = bytes.len();
            bytes.truncate(HEAD_BYTES + cut % (len - HEAD_BYTES));
        }
        if let Ok(found) = Bequest::decode(&sealed(bytes), BYTES, "here") {
            prop_assert!(found.spec.rank < found.spec.world);
            prop_assert!(found.plan.bytes() <= BYTES);
            prop_assert_eq!(found.offsets.len(), found.plan.tensor_count());
            prop_assert_eq!(found.objects.len(), found.plan.object_count());
            for offset in found.offsets {
                prop_assert!(offset <= BYTES);
            }
        }
    }
}
