//! Small files that stand for endless work: parts that are shared by many, so that a reader that walks, copies or
//! compares them for each would take hours or terabytes. Each file here is a few megabytes and has to be dealt with
//! at once.

use forebay_error::Code;
use forebay_format::dcp::metadata::DcpMetadata;
use forebay_format::pickle::{Options, parse};
use std::time::{Duration, Instant};

/// How often the shared part is used.
const MANY: usize = 100_000;

/// A pickle in the making.
#[derive(Clone)]
struct Pickle(Vec<u8>);

impl Pickle {
    fn new() -> Self {
        Pickle(b"\x80\x04".to_vec())
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(self, text: &str) -> Self {
        let len = (text.len() as u32).to_le_bytes();
        self.raw(b"X").raw(&len).raw(text.as_bytes())
    }

    /// Keeps what was made last, and takes it from the stack.
    fn keep(self, number: u8) -> Self {
        self.raw(&[b'q', number, b'0'])
    }

    fn get(self, number: u8) -> Self {
        self.raw(&[b'h', number])
    }

    /// An instance of a class of `module`; its state, a dict, is what `fields` puts on the stack.
    fn instance(self, module: &str, class: &str, fields: impl FnOnce(Self) -> Self) -> Self {
        let made = self.text(module).text(class).raw(b"\x93)\x81}(");
        fields(made).raw(b"ub")
    }

    fn repeat(mut self, times: usize, bytes: &[u8]) -> Self {
        for _ in 0..times {
            self.0.extend_from_slice(bytes);
        }
        self
    }
}

const MODULE: &str = "torch.distributed.checkpoint.metadata";

/// A `.metadata` whose three dicts, and what follows, are put on the stack by the caller after `kept`.
fn metadata(
    kept: Pickle,
    state: impl FnOnce(Pickle) -> Pickle,
    storage: impl FnOnce(Pickle) -> Pickle,
    rest: impl FnOnce(Pickle) -> Pickle,
) -> Vec<u8> {
    let made = kept.instance(MODULE, "Metadata", |made| {
        let made = state(made.text("state_dict_metadata").raw(b"}(")).raw(b"u");
        let made = storage(made.text("storage_data").raw(b"}(")).raw(b"u");
        rest(made)
    });
    made.raw(b".").0
}

/// Reads it in a time that no quadratic reader can reach even in a debug build.
fn read(bytes: &[u8]) -> Result<DcpMetadata, forebay_error::Error> {
    assert!(bytes.len() < 20 << 20);
    let start = Instant::now();
    let result = DcpMetadata::read(bytes);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    result
}

fn nothing(made: Pickle) -> Pickle {
    made
}

/// A piece of [2] at 0, kept as 0; a sequence of many of it, kept as 1; its tensor as 2.
fn shared_pieces() -> Pickle {
    let size = |made: Pickle, sides: &[u8]| made.raw(b"ctorch\nSize\n").raw(sides).raw(b"\x85R");
    let made = Pickle::new().instance(MODULE, "ChunkStorageMetadata", |made| {
        let made = size(made.text("offsets"), b"K\x00\x85");
        size(made.text("sizes"), b"K\x02\x85")
    });
    let made = made.keep(0).raw(b"](").repeat(MANY, b"h\x00").raw(b"e").keep(1);
    let made = made.instance(MODULE, "TensorStorageMetadata", |made| {
        let made = made.text("properties").instance(MODULE, "TensorProperties", |made| {
            made.text("dtype").raw(b"ctorch\nfloat32\n")
        });
        size(made.text("size"), b"K\x02\x85").text("chunks").get(1)
    });
    made.keep(2)
}

#[test]
fn tensors_that_share_their_pieces() {
    let state = |mut made: Pickle| {
        for number in 0..MANY {
            made = made.text(&number.to_string()).get(2);
        }
        made
    };
    let error = read(&metadata(shared_pieces(), state, nothing, nothing)).err().unwrap();
    assert_eq!(error.code(), Code::InvalidMetadata);
    assert!(error.what().contains("more pieces than a file of this length"), "{error}");
}

#[test]
fn objects_that_share_a_long_state() {
    let mut kept = Pickle::new().raw(b"}(");
    for number in 0..MANY {
        kept = kept.text(&number.to_string()).raw(b"N");
    }
    let kept = kept.raw(b"u").keep(0).text(MODULE).text("MetadataIndex").raw(b"\x93").keep(1);
    let storage = |made: Pickle| made.repeat(MANY, b"h\x01)\x81h\x00bN");
    let error = read(&metadata(kept, nothing, storage, nothing)).err().unwrap();
    assert!(error.what().contains("no MetadataIndex"), "{error}");
}

/// Items of storage_data that all have the texts that are kept as 0 (name) and 1 (path).
fn items_with(name: &str, path: &str) -> Vec<u8> {
    let kept = Pickle::new().text(name).keep(0).text(path).keep(1);
    let kept = kept.text(MODULE).text("MetadataIndex").raw(b"\x93").keep(2);
    let kept = kept.text("torch.distributed.checkpoint.filesystem").text("_StorageInfo");
    let kept = kept.raw(b"\x93").keep(3).text("fqn").keep(4).text("relative_path").keep(5);
    let kept = kept.text("offset").keep(6).text("length").keep(7);
    let item = b"h\x02)\x81}h\x04h\x00sbh\x03)\x81}(h\x05h\x01h\x06K\x00h\x07K\x01ub";
    metadata(kept, nothing, |made| made.repeat(MANY, item), nothing)
}

#[test]
fn items_that_share_a_long_name() {
    let found = read(&items_with(&"n".repeat(1 << 20), "file")).unwrap();
    // The names that are kept are no longer than the file.
    assert!((1..20).contains(&found.stale().len()), "{}", found.stale().len());
    assert!(found.warnings()[0].starts_with("100000 stored items"), "{:?}", found.warnings());
    assert_eq!(read(&items_with("n", "file")).unwrap().stale().len(), MANY);
}

#[test]
fn items_that_share_a_long_path() {
    let error = read(&items_with("n", &"p".repeat(1 << 20))).err().unwrap();
    assert_eq!(error.code(), Code::UnsafePath);
}

#[test]
fn ways_that_share_a_long_tail() {
    let mut kept = Pickle::new().raw(b"(").repeat(MANY, b"K\x01").raw(b"t").keep(0);
    kept = kept.text(MODULE).text("BytesStorageMetadata").raw(b"\x93)\x81").keep(1);
    kept = kept.text(MODULE).text("MetadataIndex").raw(b"\x93").keep(2);
    kept = kept.instance("torch.distributed.checkpoint.filesystem", "_StorageInfo", |made| {
        let made = made.text("relative_path").text("file");
        made.text("offset").raw(b"K\x00").text("length").raw(b"K\x01")
    });
    kept = kept.keep(3);
    let names = |mut made: Pickle, value: u8| {
        for number in 0..MANY {
            made = made.text(&number.to_string()).get(value);
        }
        made
    };
    let planner = |made: Pickle| names(made.text("planner_data").raw(b"}("), 0).raw(b"u");
    let storage = |mut made: Pickle| {
        for number in 0..MANY {
            made =
                made.get(2).raw(b")\x81}").text("fqn").text(&number.to_string()).raw(b"sb").get(3);
        }
        made
    };
    let found = read(&metadata(kept, |made| names(made, 1), storage, planner)).unwrap();
    // As many steps as the file has bytes were kept; the other ways are told.
    assert_eq!(found.entries().len(), MANY);
    let known = found.entries().filter(|entry| entry.path.is_some()).count();
    assert!((1..1000).contains(&known), "{known}");
    let warning = format!("planner_data has {} items that are no way", MANY - known);
    assert!(found.warnings()[0].starts_with(&warning), "{:?}", found.warnings());
}

#[test]
fn attributes_that_double_and_double() {
    let mut made = Pickle::new().raw(b"]").keep(0);
    for level in 1..100_u8 {
        made = made.raw(b"(").get(level - 1).get(level - 1).raw(b"l").keep(level);
    }
    let rest = |mut made: Pickle| {
        for number in 0..30 {
            let value = if number < 3 { 99 } else { 1 };
            made = made.text(&format!("attribute {number}")).get(value);
        }
        made
    };
    let found = read(&metadata(made, nothing, nothing, rest)).unwrap();
    assert_eq!(found.attributes().len(), 20);
    assert!(found.attribute("attribute 2").unwrap().json().is_err());
    assert_eq!(found.attribute("attribute 3").unwrap().json().unwrap(), "[[],[]]");
    assert_eq!(found.warnings(), ["only 20 attributes of the metadata are kept"]);
}

#[test]
fn classes_that_share_long_names() {
    let kept = Pickle::new().text(&"m".repeat(1 << 20)).keep(0).text(&"n".repeat(1 << 20)).keep(1);
    let bytes = kept.raw(b"(").repeat(MANY, b"h\x00h\x01\x93").raw(b"t.").0;
    let graph = parse(&bytes, &Options::METADATA).unwrap();
    let mut items = graph.as_sequence(graph.root()).unwrap();
    let first = items.next().unwrap();
    assert!(items.all(|item| item == first));
    assert!(graph.memory_bytes() < 4 * bytes.len());
}
