//! `.metadata` as other versions of torch and Python, and other tools, spell it; and what must be refused.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use forebay_error::Code;
use forebay_format::dcp::metadata::{Checks, DcpMetadata, Entry, EntryKind, Step};
use forebay_tensor::Dtype;
use std::path::Path;

fn bytes(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/metadata.json");
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let hex = file[name].as_str().unwrap();
    let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(digit).collect()
}

fn read(name: &str) -> DcpMetadata {
    DcpMetadata::read(&bytes(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn only(metadata: &DcpMetadata) -> Entry<'_> {
    assert_eq!(metadata.entries().len(), 1);
    metadata.entries().next().unwrap()
}

/// Offsets, sizes and where: file offset, or none.
type Piece = (Vec<u64>, Vec<u64>, Option<u64>);

/// Torch's dtype, ours, the shape and the pieces of the only entry.
fn tensor(metadata: &DcpMetadata) -> (String, Option<Dtype>, Vec<u64>, Vec<Piece>) {
    let EntryKind::Tensor { element, shape, chunks } = only(metadata).kind else {
        panic!("no tensor");
    };
    let pieces = chunks.map(|chunk| {
        let at = chunk.place.map(|place| place.offset);
        (chunk.offsets.to_vec(), chunk.sizes.to_vec(), at)
    });
    (element.torch.clone(), element.dtype, shape.to_vec(), pieces.collect())
}

fn four_rows() -> Vec<Piece> {
    (0..4).map(|row| (vec![row, 0], vec![1, 2], Some(1000 * row))).collect()
}

#[test]
fn properties_of_every_torch_are_read() {
    for name in [
        "torch_2_2",
        "torch_2_15_strides",
        "strides_none",
        "protocol_2",
        "protocol_3",
        "protocol_5",
    ] {
        let metadata = read(name);
        let (torch, dtype, shape, pieces) = tensor(&metadata);
        assert_eq!((torch.as_str(), dtype, shape), ("float32", Some(Dtype::F32), vec![4, 2]));
        assert_eq!(pieces, four_rows(), "{name}");
        assert!(metadata.warnings().is_empty());
    }
    assert_eq!(read("torch_2_2").version(), None);
    assert!(read("torch_2_2").storage_meta().is_none());
    assert_eq!(read("torch_2_15_strides").version(), Some("1.0.0"));
}

#[test]
fn both_spellings_of_paths_are_read() {
    for (name, path) in [
        ("path_of_parts", Some("/a/b c")),
        ("path_of_python_3_13", Some("/a/b c")),
        ("path_as_text", Some("/a/b c")),
        ("path_not_utf8", Some("/a/\u{fffd}\u{fffd}\u{fffd}")),
        ("path_none", None),
    ] {
        let metadata = read(name);
        let meta = metadata.storage_meta().unwrap();
        assert_eq!(meta.checkpoint_id.as_deref(), path, "{name}");
        assert_eq!((meta.save_id.as_deref(), meta.load_id.as_deref()), (Some("s"), None));
        assert_eq!(meta.modules, ["m"]);
    }
}

#[test]
fn what_megatron_adds_is_kept_or_opaque() {
    let metadata = read("megatron");
    assert_eq!(tensor(&metadata).2, [8]);
    let data = metadata.attribute("mcore_data").unwrap();
    assert_eq!(data.json().unwrap(), r#"{"w":{"nd_reformulated_orig_global_shape":[8]}}"#);
    let backend = metadata.attribute("backend").unwrap().json().unwrap_err();
    assert!(backend.what().contains("megatron.core.other.Backend"), "{backend}");
    assert_eq!(metadata.attributes().len(), 2);
}

#[test]
fn an_own_attribute_is_kept() {
    let metadata = read("own_attribute");
    let own = metadata.attribute("forebay").unwrap().json().unwrap();
    let own: serde_json::Value = serde_json::from_str(own).unwrap();
    assert_eq!(own["manifest"], "forebay.manifest-1");
    assert!(metadata.attribute("other").is_none());
}

#[test]
fn places_are_found_with_and_without_hints() {
    for name in ["no_hints", "wrong_hints", "hints_out_of_range", "without_memo"] {
        assert_eq!(tensor(&read(name)).3, four_rows(), "{name}");
    }
    assert_eq!(tensor(&read("key_without_offset")).3, [(vec![0], vec![4], Some(0))]);
    assert_eq!(read("info_of_another_class").files(), ["f"]);
}

#[test]
fn pieces_without_elements_may_be_anywhere() {
    let places = |name| tensor(&read(name)).3.into_iter().map(|piece| piece.2).collect::<Vec<_>>();
    // The last starts where the first does; the place is that of the one with elements.
    assert_eq!(places("empty_pieces"), [Some(7), Some(8), Some(8), None]);
    assert_eq!(places("empty_pieces_not_stored"), [Some(0), None]);
    assert_eq!(places("no_elements"), [Some(0)]);
    assert_eq!(tensor(&read("no_dimensions")).3, [(vec![], vec![], Some(0))]);
}

#[test]
fn an_element_of_two_halves_counts_as_two() {
    let (torch, dtype, shape, pieces) = tensor(&read("halves_of_bytes"));
    assert_eq!((torch.as_str(), dtype, shape), ("float4_e2m1fn_x2", Some(Dtype::F4), vec![2, 6]));
    assert_eq!(pieces[1], (vec![1, 0], vec![1, 6], Some(1)));
    // Nothing to double.
    assert_eq!(tensor(&read("halves_of_bytes_0d")).1, None);
}

#[test]
fn a_dtype_without_a_counterpart_spoils_only_its_entry() {
    for (name, torch) in [("complex128", "complex128"), ("quantized", "quint8")] {
        let (found, dtype, shape, _) = tensor(&read(name));
        assert_eq!((found.as_str(), dtype, shape), (torch, None, vec![2]));
    }
}

#[test]
fn ways_in_the_nested_state() {
    let metadata = read("large_numbers");
    assert_eq!(tensor(&metadata).2, [1 << 40]);
    assert_eq!(only(&metadata).path.unwrap(), [Step::Key("w"), Step::Index(1 << 33)]);
    let metadata = read("objects");
    let paths: Vec<_> = metadata.entries().map(|entry| entry.path.unwrap()).collect();
    assert_eq!(paths, [vec![Step::Key("a"), Step::Index(0)], vec![Step::Key("b")]]);
    let transforms: Vec<_> = metadata
        .entries()
        .map(|entry| match entry.kind {
            EntryKind::Object { place } => place.transforms,
            EntryKind::Tensor { .. } => panic!("no object"),
        })
        .collect();
    assert_eq!(transforms, [&[][..], &["stream.zstd/1".to_string()]]);
    for (name, warning) in [
        ("planner_is_odd", "planner_data has 2 items that are no way to an entry"),
        ("planner_is_a_list", "planner_data is no dict"),
    ] {
        let metadata = read(name);
        assert_eq!(only(&metadata).path, None);
        assert!(metadata.warnings()[0].starts_with(warning), "{:?}", metadata.warnings());
    }
    assert_eq!(read("bytes_behind").warnings(), ["4 bytes follow the end of .metadata's pickle"]);
}

/// Saves without collectives leave a file for each rank, with that rank's pieces.
#[test]
fn the_file_of_one_rank_needs_no_coverage() {
    let part = bytes("one_rank");
    assert_eq!(DcpMetadata::read(&part).err().unwrap().code(), Code::Hole);
    let metadata = DcpMetadata::read_with(&part, Checks { coverage: false }).unwrap();
    assert_eq!(tensor(&metadata).3, four_rows()[..2]);
}

#[test]
fn what_is_wrong_is_refused() {
    for (name, code, what) in [
        ("place_overflows", Code::OutOfBounds, "past 2^63"),
        ("place_is_huge", Code::InvalidMetadata, "the length is no integer of 64 bits"),
        ("path_with_backslashes", Code::UnsafePath, "backslash"),
        ("path_with_nul", Code::UnsafePath, "NUL"),
        ("path_with_drive", Code::UnsafePath, "drive"),
        ("path_not_text", Code::InvalidMetadata, "no text"),
        ("stored_twice", Code::InvalidMetadata, "stored twice"),
        ("negative_side", Code::InvalidMetadata, "is -2; it must be a count"),
        ("too_many_sides", Code::InvalidMetadata, "65 dimensions"),
        ("too_many_elements", Code::Overflow, "2^64"),
        ("side_is_a_text", Code::InvalidMetadata, "no integer"),
        ("side_is_true", Code::InvalidMetadata, "no integer"),
        ("no_dtype", Code::InvalidMetadata, "no dtype"),
        ("entry_of_another_class", Code::InvalidMetadata, "nobody.knows.Entry"),
        ("entry_is_a_number", Code::InvalidMetadata, "no object of torch"),
        ("name_is_a_number", Code::InvalidMetadata, "a name that is no text"),
        ("storage_is_none", Code::InvalidMetadata, "storage_data is no dict"),
        ("key_is_a_text", Code::InvalidMetadata, "no MetadataIndex"),
        ("transforms_are_numbers", Code::InvalidMetadata, "no list of texts"),
        ("object_not_stored", Code::Hole, "\"o\": the object is stored nowhere"),
        ("no_pieces", Code::Hole, "\"w\""),
        ("layout_is_a_call", Code::ForbiddenGlobal, "posix.system"),
    ] {
        match DcpMetadata::read(&bytes(name)) {
            Ok(_) => panic!("{name} was read"),
            Err(error) => {
                assert_eq!(error.code(), code, "{name}: {error}");
                assert!(error.what().contains(what), "{name}: {error}");
            }
        }
    }
}
