//! Saves from the host, with the faults that files have. **unsafe**: memory is given by address.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod common;

use std::fs::File;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use common::{host_engine, pattern};
use forebay_engine::{EngineConfig, FileSink, Part, RangeSink, WriteOptions};
use forebay_error::Code;

fn parts_of(bytes: &[u8], sizes: &[u64]) -> Vec<Part> {
    let mut at = 0;
    let part = |(index, &len): (usize, &u64)| {
        let address = bytes[at as usize..].as_ptr() as u64;
        // Two sinks in turn, each part 3 bytes after where it would lie without gaps.
        let part = Part { sink: index % 2, offset: at + 3, address, len };
        at += len;
        part
    };
    sizes.iter().enumerate().map(part).collect()
}

#[test]
fn parts_land_in_their_sinks() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let sizes = [1, 20 << 20, 0, 4095, 9_000_001];
    let bytes = pattern(1, sizes.iter().sum::<u64>() as usize);
    let paths = [folder.path().join("a"), folder.path().join("b")];
    let files = paths.each_ref().map(|path| File::create(path).unwrap());
    let sinks = [FileSink::new(&files[0], "a"), FileSink::new(&files[1], "b")];
    let sinks = [&sinks[0] as &dyn RangeSink, &sinks[1]];
    let engine = host_engine(EngineConfig::default());
    let parts = parts_of(&bytes, &sizes);
    for threads in [None, Some(1), Some(5)] {
        let options = WriteOptions { threads, stream: None };
        // SAFETY: `bytes` outlives the call.
        let report = unsafe { engine.write(&parts, &sinks, options, &AtomicBool::new(false)) };
        assert_eq!(report.unwrap().bytes, bytes.len() as u64);
        let saved = paths.each_ref().map(|path| std::fs::read(path).unwrap());
        let mut at = 0;
        for part in &parts {
            let (offset, len) = (part.offset as usize, part.len as usize);
            assert!(saved[part.sink][offset..offset + len] == bytes[at..at + len]);
            at += len;
        }
    }
}

/// Writes a little at a time, and fails where it is told to.
struct Faulty {
    data: Mutex<Vec<u8>>,
    fail_at: u64,
}

impl RangeSink for Faulty {
    fn name(&self) -> String {
        "checkpoint".to_owned()
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let count = bytes.len().min(70_001);
        if (offset..offset + count as u64).contains(&self.fail_at) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let (start, mut data) = (offset as usize, self.data.lock().unwrap());
        let end = start + count;
        if data.len() < end {
            data.resize(end, 0);
        }
        data[start..end].copy_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush_soon(&self, _offset: u64, _len: u64) {}
}

#[test]
fn short_writes_are_gone_through_and_a_full_disk_is_one_clear_error() {
    let bytes = pattern(2, 3_000_000);
    let engine = host_engine(EngineConfig::default());
    let part = Part { sink: 0, offset: 0, address: bytes.as_ptr() as u64, len: 3_000_000 };
    for (fail_at, full) in [(u64::MAX - 1, false), (2_000_000, true)] {
        let sink = Faulty { data: Mutex::default(), fail_at };
        let stop = AtomicBool::new(false);
        // SAFETY: `bytes` outlives the call.
        let result = unsafe { engine.write(&[part], &[&sink], WriteOptions::default(), &stop) };
        if full {
            let error = result.unwrap_err();
            assert_eq!(error.code(), Code::NoSpace);
            assert!(error.render().contains("checkpoint") && error.render().contains("byte"));
        } else {
            result.unwrap();
            assert!(*sink.data.lock().unwrap() == bytes);
        }
    }
}

#[test]
fn a_save_that_is_stopped_says_so() {
    let bytes = pattern(3, 40 << 20);
    let engine = host_engine(EngineConfig::default());
    let part = Part { sink: 0, offset: 0, address: bytes.as_ptr() as u64, len: 40 << 20 };
    let stop = AtomicBool::new(true);
    let sink = Faulty { data: Mutex::default(), fail_at: u64::MAX - 1 };
    // SAFETY: `bytes` outlives the call.
    let result = unsafe { engine.write(&[part], &[&sink], WriteOptions::default(), &stop) };
    assert_eq!(result.unwrap_err().code(), Code::Cancelled);
    assert!(sink.data.lock().unwrap().is_empty());
}

#[test]
fn a_part_without_a_sink_is_refused() {
    let engine = host_engine(EngineConfig::default());
    let part = Part { sink: 1, offset: 0, address: 1, len: 1 };
    let sink = Faulty { data: Mutex::default(), fail_at: 0 };
    let stop = AtomicBool::new(false);
    // SAFETY: refused before anything is read.
    let result = unsafe { engine.write(&[part], &[&sink], WriteOptions::default(), &stop) };
    assert_eq!(result.unwrap_err().code(), Code::Internal);
}
