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
