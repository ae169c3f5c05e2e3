//! The order of parts, frames and references. That Python reads the result is tested with torch (python/tests/interop).

use super::*;

const PROPS: TensorProps =
    TensorProps { dtype: TorchDtype::BFloat16, requires_grad: false, pin_memory: false };

fn meta() -> StorageMeta {
    StorageMeta { checkpoint_id: "run/step-1".to_owned(), save_id: "0-1".to_owned() }
}

/// The opcodes, without frames; checks that frames are whole and of the right size.
fn unframed(pickle: &[u8]) -> Vec<u8> {
    assert_eq!(pickle[..2], [0x80, 4]);
    let (mut rest, mut body) = (&pickle[2..], Vec::new());
    while let Some((&opcode, after)) = rest.split_first() {
        assert_eq!(opcode, 0x95, "a frame follows the last");
        let len = u64::from_le_bytes(after[..8].try_into().unwrap()) as usize;
        body.extend_from_slice(&after[8..8 + len]);
        rest = &after[8 + len..];
    }
    assert_eq!(body.last(), Some(&b'.'));
    body
}

fn count(body: &[u8], text: &str) -> usize {
    body.windows(text.len()).filter(|window| *window == text.as_bytes()).count()
}

#[test]
fn what_repeats_is_written_once() {
    let mut writer = MetadataWriter::new(Vec::new()).unwrap();
    for entry in 0..3000u32 {
        writer.tensor(&format!("tensor.{entry:04}"), &PROPS, &[1 << 40, 8]).unwrap();
        for rank in 0..2 {
            writer.chunk(&[rank << 39, 0], &[1 << 39, 8]).unwrap();
        }
    }
    for entry in 0..3000 {
        writer.path(entry, &[KeyStep::Key("layers"), KeyStep::Index(entry.into())]).unwrap();
    }
    for rank in 0..2 {
        for entry in 0..3000 {
            writer.stored(entry, rank, &format!("x_{rank}_0.distcp"), 70_000, 800).unwrap();
        }
    }
    let body = unframed(&writer.finish(&meta(), &[]).unwrap());
    let once = ["tensor.0007", "bfloat16", "layers", "x_1_0.distcp", "_StorageInfo", "offsets"];
    for text in once {
        assert_eq!(count(&body, text), 1, "{text}");
    }
    // Two chunks of some 110 bytes, and a path.
    assert!(body.len() < 3000 * 290, "{} bytes", body.len());
}

#[test]
fn parts_out_of_order_and_left_out_are_refused() {
    let start = || {
        let mut writer = MetadataWriter::new(Vec::new()).unwrap();
        writer.object("lr").unwrap();
        writer.tensor("w", &PROPS, &[4]).unwrap();
        writer.chunk(&[0], &[4]).unwrap();
        writer
    };
    assert!(start().finish(&meta(), &[]).is_err(), "nothing stored");
    assert!(start().chunk(&[0, 0], &[4, 1]).is_err(), "other dimensions");
    assert!(start().stored(1, 1, "f", 0, 1).is_err(), "no such chunk");
    assert!(start().stored(0, 1, "f", 0, 1).is_err(), "an object has one");
    assert!(start().stored(2, 0, "f", 0, 1).is_err(), "no such entry");
    let mut writer = start();
    writer.stored(0, 0, "f", 0, 1).unwrap();
    assert!(writer.path(0, &[]).is_err(), "paths come before places");
    assert!(writer.object("late").is_err());
    assert!(writer.chunk(&[4], &[0]).is_err());
    writer.stored(1, 0, "f", 1, 1).unwrap();
    assert!(writer.stored(1, 0, "f", 1, 1).is_err(), "one too many");
    let mut deep = PlainValue::None;
    for _ in 0..20 {
        deep = PlainValue::List(vec![deep]);
    }
    let mut writer = start();
    writer.stored(0, 0, "f", 0, 1).unwrap();
    writer.stored(1, 0, "f", 1, 1).unwrap();
    assert!(writer.finish(&meta(), &[("deep", deep)]).is_err());
    let error = MetadataWriter::new(Vec::new()).unwrap().tensor("w", &PROPS, &[1; 65]).unwrap_err();
    assert_eq!(error.code(), forebay_error::Code::Unsupported);
}

#[test]
fn a_stream_that_fails_says_so() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::Error::from_raw_os_error(28))
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let error = MetadataWriter::new(Full).err().unwrap();
    assert_eq!(error.code(), forebay_error::Code::NoSpace);
}

#[test]
fn our_own_reader_gives_back_what_was_written() {
    use crate::dcp::metadata::{DcpMetadata, EntryKind, Step};

    let mut writer = MetadataWriter::new(Vec::new()).unwrap();
    writer.object("lr").unwrap();
    writer.tensor("w", &PROPS, &[5_000_000_000, 2]).unwrap();
    writer.chunk(&[0, 0], &[3_000_000_000, 2]).unwrap();
    writer.chunk(&[3_000_000_000, 0], &[2_000_000_000, 2]).unwrap();
    writer.tensor("scalar", &PROPS, &[]).unwrap();
    writer.chunk(&[], &[]).unwrap();
    writer.path(0, &[KeyStep::Key("lr")]).unwrap();
    writer.path(1, &[KeyStep::Key("layers"), KeyStep::Index(300)]).unwrap();
    writer.path(2, &[KeyStep::Key("a"), KeyStep::Key("b"), KeyStep::Key("c")]).unwrap();
    writer.stored(1, 1, "b.distcp", 1 << 40, 9_000_000_000).unwrap();
    writer.stored(0, 0, "a.distcp", 0, 500).unwrap();
    writer.stored(2, 0, "a.distcp", 500, 700).unwrap();
    writer.stored(1, 0, "a.distcp", 4096, 12_000_000_700).unwrap();
    let ours = PlainValue::Dict(vec![("version".to_owned(), PlainValue::Int(1))]);
    let bytes = writer.finish(&meta(), &[("forebay", ours)]).unwrap();

    let read = DcpMetadata::read(&bytes).unwrap();
    assert_eq!(read.version(), Some("1.0.0"));
    assert_eq!(read.attribute("forebay").unwrap().json().unwrap(), r#"{"version":1}"#);
    assert!(read.stale().is_empty() && read.warnings().is_empty());
    let entries: Vec<_> = read.entries().collect();
    assert_eq!(entries.iter().map(|entry| entry.name).collect::<Vec<_>>(), ["lr", "w", "scalar"]);
    assert_eq!(entries[1].path, Some(vec![Step::Key("layers"), Step::Index(300)]));
    let place = |place: crate::dcp::metadata::Place<'_>| {
        (read.files()[place.file].clone(), place.offset, place.length)
    };
    let EntryKind::Object { place: object } = entries[0].kind else { panic!("not an object") };
    assert_eq!(place(object), ("a.distcp".to_owned(), 0, 500));
    let EntryKind::Tensor { element, shape, chunks } = &entries[1].kind else {
        panic!("not a tensor")
    };
    assert_eq!((element.torch.as_str(), *shape), ("bfloat16", &[5_000_000_000, 2][..]));
    let chunks: Vec<_> = chunks.clone().collect();
    assert_eq!(chunks.len(), 2);
    assert_eq!(
        (chunks[1].offsets, chunks[1].sizes),
        (&[3_000_000_000, 0][..], &[2_000_000_000, 2][..])
    );
    assert_eq!(place(chunks[0].place.unwrap()), ("a.distcp".to_owned(), 4096, 12_000_000_700));
    assert_eq!(place(chunks[1].place.unwrap()), ("b.distcp".to_owned(), 1 << 40, 9_000_000_000));
}
