//! Files of torch.save, made by torch itself (tests/cases/torch, with the script), read as models; and archives that
//! are damaged at every place.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use forebay_error::Code;
use forebay_format::pickle::{Options, parse};
use forebay_format::torch_zip::{Archive, PlainValue, ReadAt, View, leaves, tensor};
use forebay_format::{
    Catalog, Model, Stored, hex, open_model, read_tensor, sha256_tensor, verify_checks,
};
use forebay_tensor::{Dtype, Region};
use proptest::prelude::*;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases/torch")
}

fn expected() -> serde_json::Map<String, Value> {
    let text = std::fs::read_to_string(folder().join("expected.json")).unwrap();
    match serde_json::from_str(&text).unwrap() {
        Value::Object(map) => map,
        other => panic!("{other}"),
    }
}

fn open(name: &str) -> Model {
    open_model(&folder().join(name)).unwrap_or_else(|error| panic!("{name}: {error:?}"))
}

/// Small numbers are equal as they are, long ones as floats: JSON here has 64 bits.
fn same(ours: &str, theirs: &Value) -> bool {
    let ours: Value = serde_json::from_str(ours).unwrap();
    match (ours.as_f64(), theirs.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => ours == *theirs,
    }
}

/// Compares every checksum.
fn check_all(model: &Model) -> forebay_error::Result<(usize, u64)> {
    let all: Vec<usize> = (0..model.catalog.tensors.len()).collect();
    verify_checks(&model.catalog, &model.files, &all, |_| Ok(()))
}

#[test]
fn every_file_of_torch_gives_what_torch_saved() {
    let mut checked = 0;
    for (name, case) in &expected() {
        let Some(tensors) = case["tensors"].as_object() else { continue };
        let model = open(name);
        let catalog = &model.catalog;
        assert_eq!(catalog.format.name(), "torch");
        assert_eq!(catalog.tensors.len(), tensors.len(), "{name}");
        for (tensor, want) in tensors {
            let place = format!("{name}, {tensor}");
            let entry = catalog.get(tensor).unwrap_or_else(|| panic!("{place} is missing"));
            assert_eq!(entry.dtype.name(), want["dtype"], "{place}");
            assert_eq!(Value::from(entry.shape.clone()), want["shape"], "{place}");
            let digest = hex(&sha256_tensor(&model.files, entry).unwrap());
            assert_eq!(digest, want["sha256"].as_str().unwrap(), "{place}");
            checked += 1;
        }
        let objects = case["objects"].as_object().unwrap();
        let names =
            |names: Vec<&str>| names.into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
        let held = catalog.objects.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names(held), names(objects.keys().map(String::as_str).collect()), "{name}");
        for entry in &catalog.objects {
            let want = &objects[&entry.name];
            let place = format!("{name}, {}: {:?} for {want}", entry.name, entry.object);
            match &entry.object.value {
                PlainValue::Json(json) => assert!(same(json, want), "{place}"),
                PlainValue::Opaque(_) => assert_eq!(want["opaque"], true, "{place}"),
                PlainValue::Forbidden(why) => {
                    assert!(why.contains(want["forbidden"].as_str().unwrap()), "{place}");
                }
            }
        }
        let left_out = case["left_out"].as_array().unwrap();
        assert_eq!(catalog.warnings.len(), left_out.len(), "{name}: {:?}", catalog.warnings);
        for tensor in left_out {
            let quoted = format!("\"{}\"", tensor.as_str().unwrap());
            assert!(catalog.warnings.iter().any(|text| text.contains(&quoted)), "{name}: {quoted}");
        }
        check_all(&model).unwrap();
    }
    assert!(checked > 60, "only {checked} tensors were compared");
}

#[test]
fn what_is_no_archive_of_data_is_refused_by_name() {
    let mut refused = 0;
    for (name, case) in &expected() {
        let Some(code) = case["error"].as_str() else { continue };
        let error = open_model(&folder().join(name)).expect_err(name);
        assert_eq!(error.code().as_str(), code, "{name}: {error:?}");
        assert!(error.place().is_some_and(|place| place.contains(name)), "{error:?}");
        refused += 1;
    }
    assert_eq!(refused, 7);
    let error = open_model(&folder().join("before_1_6.pt")).unwrap_err();
    assert!(error.hints().iter().any(|hint| hint.contains("weights_only")), "{error:?}");
}

#[test]
fn long_integers_keep_every_digit() {
    let model = open("nested.pt");
    let big = model.catalog.objects.iter().find(|entry| entry.name == "big").unwrap();
    assert_eq!(big.object.json().unwrap(), "-1180591620717411303424");
}

#[test]
fn row_major_tensors_are_plain_extents() {
    let model = open("strided.pt");
    let plain = |name: &str| model.catalog.get(name).unwrap().stored == Stored::Run;
    for name in ["whole", "rows", "one_row", "tied"] {
        assert!(plain(name), "{name} is in pieces");
    }
    for name in ["transposed", "column", "expanded", "channels_last", "windows"] {
        assert!(!plain(name), "{name} has strides");
    }
    let [whole, tied] = ["whole", "tied"].map(|name| model.catalog.get(name).unwrap());
    assert_eq!((whole.offset, whole.bytes), (tied.offset, tied.bytes), "one storage, two names");
}

#[test]
fn regions_of_strided_tensors_are_gathered() {
    let model = open("strided.pt");
    let whole = |name: &str| {
        let mut bytes = Vec::new();
        read_tensor(&model.files, model.catalog.get(name).unwrap(), |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })
        .unwrap();
        bytes
    };
    let source = std::fs::read(folder().join("strided.pt")).unwrap();
    for name in ["channels_last", "permuted", "transposed", "windows", "expanded"] {
        let entry = model.catalog.get(name).unwrap();
        let all = whole(name);
        let element = (entry.dtype.bits() / 8) as usize;
        // The last half of each side.
        let offsets: Vec<u64> = entry.shape.iter().map(|side| side / 2).collect();
        let sizes = entry.shape.iter().zip(&offsets).map(|(side, at)| side - at).collect();
        let region = Region::new(offsets, sizes).unwrap();
        let mut got = vec![0; region.elements() as usize * element];
        for placed in entry.gathers(Some(&region)).unwrap() {
            placed.runs.copy(&source, &mut got).unwrap();
        }
        let runs = forebay_tensor::byte_runs(entry.dtype, &entry.shape, &region).unwrap();
        let mut want = Vec::new();
        for (at, _) in &runs {
            want.extend_from_slice(&all[at as usize..(at + runs.run) as usize]);
        }
        assert_eq!(got, want, "{name}");
    }
}

/// Opens an archive as deep as a load would: directory, pickle, every record, every checksum.
fn open_deep(bytes: &[u8]) -> forebay_error::Result<Vec<(String, Vec<u8>)>> {
    let source = bytes.to_vec();
    let archive = Archive::open(&source, 0, source.len() as u64)?;
    archive.check_all_crcs()?;
    let record = archive.record("data.pkl")?.unwrap();
    let pickle = archive.read(&record, 1 << 20)?;
    let graph = parse(&pickle, &Options::ITEM)?;
    let mut read = Vec::new();
    for (name, leaf) in leaves(&graph)? {
        if let forebay_format::torch_zip::Leaf::Tensor(Ok(view)) = leaf {
            let record = view.check_record(archive.record(&view.record)?)?;
            read.push((name, archive.read(&record, u64::MAX)?));
        }
    }
    Ok(read)
}

#[test]
fn no_flipped_bit_gives_other_numbers_and_none_panics() {
    let bytes = std::fs::read(folder().join("alone.pt")).unwrap();
    let sound = open_deep(&bytes).unwrap();
    let mut refused = 0;
    for at in 0..bytes.len() {
        for bit in [0, 3, 7] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            match open_deep(&damaged) {
                // Times, versions, padding: nothing that counts.
                Ok(read) => assert_eq!(read, sound, "byte {at}, bit {bit}"),
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > bytes.len(), "only {refused} flips were noticed");
}

#[test]
fn no_cut_archive_is_read() {
    let bytes = std::fs::read(folder().join("nested.pt")).unwrap();
    for len in 0..bytes.len() {
        assert!(open_deep(&bytes[..len]).is_err(), "cut to {len} bytes");
    }
}

#[test]
fn archives_are_found_inside_of_other_bytes() {
    let item = std::fs::read(folder().join("alone.pt")).unwrap();
    let mut file = vec![7; 1001];
    file.extend_from_slice(&item);
    file.extend_from_slice(&[9; 500]);
    let len = item.len() as u64;
    let archive = Archive::open(&file, 1001, len).unwrap();
    archive.check_all_crcs().unwrap();
    let record = archive.record("data.pkl").unwrap().unwrap();
    let at = record.offset as usize;
    assert_eq!(file[at..at + record.bytes as usize], archive.read(&record, 4096).unwrap());
    assert!(!archive.has("data/7") && archive.record("data/7").unwrap().is_none());
    assert_eq!(Archive::open(&file, 1001, 1 << 40).err().unwrap().code(), Code::OutOfBounds);
    assert_eq!(Archive::open(&file, u64::MAX, 2).err().unwrap().code(), Code::OutOfBounds);
    assert_eq!(Archive::open(&file, 1000, len).err().unwrap().code(), Code::InvalidItem);
    assert_eq!(Archive::open(&file, 1001, len + 1).err().unwrap().code(), Code::InvalidItem);
    let read = archive.read(&record, record.bytes - 1).unwrap_err();
    assert_eq!(read.code(), Code::Unsupported);
}

/// A source that counts its reads.
struct Counted<'a>(&'a Vec<u8>, std::sync::atomic::AtomicUsize);

impl ReadAt for Counted<'_> {
    fn name(&self) -> String {
        "counted".to_owned()
    }

    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> forebay_error::Result<()> {
        self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        ReadAt::read_exact_at(self.0, buffer, offset)
    }
}

/// Zeros, with an end record that says what it likes of a directory from byte 0 on.
struct Claims {
    size: u64,
    end: Vec<u8>,
    most: std::sync::atomic::AtomicUsize,
}

impl Claims {
    fn new(size: u64, entries: u64, bytes: u64) -> Self {
        let mut end = Vec::new();
        let words = |end: &mut Vec<u8>, words: &[u64]| {
            words.iter().for_each(|word| end.extend_from_slice(&word.to_le_bytes()));
        };
        end.extend_from_slice(&0x0606_4B50_u32.to_le_bytes());
        end.extend_from_slice(&[0; 28]);
        words(&mut end, &[entries, bytes, 0]);
        end.extend_from_slice(&0x0706_4B50_u32.to_le_bytes());
        end.extend_from_slice(&[0; 4]);
        words(&mut end, &[size - 98]);
        end.extend_from_slice(&[0; 4]);
        end.extend_from_slice(&0x0605_4B50_u32.to_le_bytes());
        end.extend_from_slice(&[0; 4]);
        end.extend_from_slice(&[0xff; 12]);
        end.extend_from_slice(&[0; 2]);
        assert_eq!(end.len(), 98);
        Self { size, end, most: 0.into() }
    }
}

impl ReadAt for Claims {
    fn name(&self) -> String {
        "claims".to_owned()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> forebay_error::Result<()> {
        self.most.fetch_max(buffer.len(), std::sync::atomic::Ordering::Relaxed);
        assert!(buffer.len() <= 1 << 20, "{} bytes at once", buffer.len());
        let end_at = self.size - self.end.len() as u64;
        for (byte, at) in buffer.iter_mut().zip(offset..) {
            *byte = at.checked_sub(end_at).map_or(0, |at| self.end[at as usize]);
        }
        Ok(())
    }
}

#[test]
fn no_memory_is_taken_on_the_word_of_an_end_record() {
    let size = 1 << 40;
    let open = |entries, bytes| {
        let claims = Claims::new(size, entries, bytes);
        let error = Archive::open(&claims, 0, size).err().unwrap();
        (error.code(), error.what().to_owned(), claims.most.into_inner())
    };
    let (code, what, most) = open(1, size - 98);
    assert!(what.contains("longer than its entries"), "{what}");
    assert_eq!((code, most), (Code::InvalidItem, 4096));
    // As many bytes as so many entries can have: the first is none already.
    let (code, what, most) = open(1 << 20, 130_000 << 20);
    assert!(what.contains("entry of the archive's directory is damaged"), "{what}");
    assert_eq!((code, most), (Code::InvalidItem, 1 << 20));
}

#[test]
fn small_items_take_one_read_and_large_ones_few() {
    let count = |name: &str| {
        let bytes = std::fs::read(folder().join(name)).unwrap();
        let source = Counted(&bytes, Default::default());
        let archive = Archive::open(&source, 0, bytes.len() as u64).unwrap();
        let pickle = archive.record("data.pkl").unwrap().unwrap();
        archive.read(&pickle, 1 << 20).unwrap();
        archive.record("data/0").unwrap().unwrap();
        source.1.into_inner()
    };
    assert_eq!(count("alone.pt"), 1);
    assert_eq!(count("nested.pt"), 1);
    // The end, the start, and the header of a storage that lies after a pickle of more than 4 KiB.
    assert!(count("dtypes.pt") <= 3);
}

/// The pickle of one tensor: storage class, key, numel; offset, shape, strides.
fn pickled(class: &str, numel: i32, start: i32, shape: &[i32], strides: &[i32]) -> Vec<u8> {
    let int = |number: i32| [&b"J"[..], &number.to_le_bytes()].concat();
    let tuple = |items: &[i32]| {
        let items: Vec<u8> = items.iter().flat_map(|&item| int(item)).collect();
        [b"(", items.as_slice(), b"t"].concat()
    };
    [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storage".to_vec(),
        format!("ctorch\n{class}\n").into_bytes(),
        b"X\x01\0\0\x000X\x03\0\0\0cpu".to_vec(),
        int(numel),
        b"tQ".to_vec(),
        int(start),
        tuple(shape),
        tuple(strides),
        b"\x89N}tR.".to_vec(),
    ]
    .concat()
}

fn view_of(pickle: &[u8]) -> forebay_error::Result<View> {
    let graph = parse(pickle, &Options::ITEM).unwrap();
    tensor(&graph, graph.root()).unwrap()
}

#[test]
fn views_stay_inside_their_storage() {
    let view = view_of(&pickled("FloatStorage", 12, 2, &[2, 3], &[1, 3])).unwrap();
    assert_eq!((view.dtype, view.bytes(), view.storage_bytes), (Dtype::F32, 24, 48));
    assert!(!view.is_row_major());
    let code = |pickle: Vec<u8>| view_of(&pickle).unwrap_err().code();
    let float = "FloatStorage";
    assert!(view_of(&pickled(float, 10, 2, &[2, 3], &[1, 3])).is_ok());
    assert_eq!(code(pickled(float, 9, 2, &[2, 3], &[1, 3])), Code::InvalidItem);
    assert_eq!(code(pickled(float, -1, 0, &[1], &[1])), Code::InvalidItem);
    assert_eq!(code(pickled(float, 9, -1, &[1], &[1])), Code::InvalidItem);
    assert_eq!(code(pickled(float, 9, 0, &[3], &[-1])), Code::InvalidItem);
    assert_eq!(code(pickled(float, 9, 0, &[3, 3], &[1])), Code::InvalidItem);
    let most = i32::MAX;
    assert_eq!(code(pickled(float, 9, 0, &[most, most, most], &[0, 0, 0])), Code::InvalidItem);
    assert_eq!(code(pickled(float, 9, most, &[most, most], &[most, most])), Code::InvalidItem);
    assert!(view_of(&pickled(float, 0, 0, &[0, most], &[most, 1])).is_ok(), "nothing is inside");
    assert_eq!(code(pickled("ComplexDoubleStorage", 9, 0, &[1], &[1])), Code::UnknownDtype);
    assert_eq!(code(pickled(float, 9, 0, &[1; 65], &[1; 65])), Code::InvalidItem);
}

#[test]
fn folders_of_pytorch_model_bin_are_models() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let copy = |from: &str, to: &str| {
        std::fs::copy(self::folder().join(from), at(to)).unwrap();
    };
    copy("alone.pt", "pytorch_model.bin");
    copy("nested.pt", "optimizer.pt");
    let names = |catalog: &Catalog| {
        let names = catalog.by_name().map(|at| catalog.tensors[at].name.clone());
        names.collect::<Vec<_>>()
    };
    assert_eq!(names(&open_model(folder.path()).unwrap().catalog), ["tensor"]);
    copy("params.pth", "pytorch_model-00002-of-00002.bin");
    copy("alone.pt", "pytorch_model-00001-of-00002.bin");
    let index = serde_json::json!({"metadata": {"total_size": 40}, "weight_map": {
        "tensor": "pytorch_model-00001-of-00002.bin",
        "weight": "pytorch_model-00002-of-00002.bin",
    }});
    std::fs::write(at("pytorch_model.bin.index.json"), index.to_string()).unwrap();
    let model = open_model(folder.path()).unwrap();
    assert_eq!(names(&model.catalog), ["tensor", "weight"]);
    assert_eq!(model.catalog.get("weight").unwrap().file, 1);
    // A tensor that is not there.
    let index = index.to_string().replace("\"weight\"", "\"other\"");
    std::fs::write(at("pytorch_model.bin.index.json"), index).unwrap();
    assert_eq!(open_model(folder.path()).unwrap_err().code(), Code::TensorNotInShard);
}

#[test]
fn a_flipped_bit_in_a_file_of_torch_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.pt");
    let mut bytes = std::fs::read(self::folder().join("nested.pt")).unwrap();
    std::fs::write(&path, &bytes).unwrap();
    let model = open_model(&path).unwrap();
    let entry = model.catalog.get("model.0.weight").unwrap();
    bytes[entry.offset as usize + 5] ^= 4;
    std::fs::write(&path, &bytes).unwrap();
    let model = open_model(&path).unwrap();
    let error = check_all(&model).unwrap_err();
    let other = model.catalog.find("model.0.bias").unwrap();
    let one = verify_checks(&model.catalog, &model.files, &[other], |_| Ok(())).unwrap();
    assert_eq!(one, (1, 12), "only what was asked for is checked");
    assert_eq!(error.code(), Code::Checksum);
    assert!(error.place().unwrap().contains("x.pt, tensor \"model.0.weight\""), "{error:?}");
}

/// The pickle of a fixture.
fn pickle_of(name: &str) -> Vec<u8> {
    let bytes = std::fs::read(folder().join(name)).unwrap();
    let archive = Archive::open(&bytes, 0, bytes.len() as u64).unwrap();
    archive.read(&archive.record("data.pkl").unwrap().unwrap(), 1 << 20).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Without a checksum in the way: any pickle is leaves or an error, and every view stays in its storage.
    #[test]
    fn changed_pickles_are_leaves_or_errors(
        strided: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut pickle = pickle_of(if strided { "strided.pt" } else { "nested.pt" });
        for (place, byte) in changes {
            let at = place.index(pickle.len());
            pickle[at] = byte;
        }
        let Ok(graph) = parse(&pickle, &Options::ITEM) else { return Ok(()) };
        for (_, leaf) in leaves(&graph).unwrap_or_default() {
            if let forebay_format::torch_zip::Leaf::Tensor(Ok(view)) = leaf {
                let span = view.memory.span_bytes(view.dtype, &view.shape).unwrap();
                prop_assert!(span <= view.storage_bytes);
            }
        }
    }
}
