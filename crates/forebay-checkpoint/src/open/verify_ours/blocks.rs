//! One pass over all data files: large reads, one after the other in each file, by several threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};
use forebay_format::dcp::verify_tensor;
use forebay_format::{Folder, OpenFile, parallel, shown};

use super::gather::{FileOf, Files};
use super::large::Large;
use super::reader::{Buffer, Reader};
use super::spans::{Item, Kind, Span, cut};
use super::{Fault, Verified};
use crate::manifest::Value;
use crate::open::item::span;
use crate::progress::Progress;
use forebay_format::dcp;

/// Bytes that are read at once, unless one span has more.
const JOB_BYTES: u64 = 4 << 20;

/// A file that is there, cut in spans.
struct Opened<'f> {
    file: &'f FileOf<'f>,
    reader: Reader,
    spans: Vec<Span>,
}

/// Spans to read at once: (file, first, after the last).
type Job = (usize, usize, usize);

/// What a job found.
#[derive(Default)]
struct Seen {
    faults: Vec<Fault>,
    checked: u64,
    unchecked: u64,
    /// Items of which a byte is wrong or unread.
    broken: Vec<usize>,
    /// Objects to look through as a whole, when all blocks were compared.
    large: Vec<usize>,
    /// CRC-32 of all of its bytes.
    crc: u32,
    bytes: u64,
}

/// Compares every byte of every file.
pub(super) fn check(
    folder: &Folder,
    files: &Files<'_>,
    progress: &impl Progress,
    found: &mut Verified,
) -> Result<()> {
    found.files = files.files.len();
    progress.total(files.bytes());
    let opened: Vec<Opened<'_>> =
        files.files.iter().filter_map(|file| open(folder, file, found)).collect();
    let jobs = jobs_of(&opened);
    let stop = AtomicBool::new(false);
    let buffers = Mutex::new(Vec::new());
    let results = parallel::map(&jobs, |&job| {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let seen = look(&opened, job, &buffers);
        if let Err(ended) = progress.add(seen.bytes) {
            stop.store(true, Ordering::Relaxed);
            return Err(ended);
        }
        Ok(Some(seen))
    });
    let mut crcs = vec![0_u32; opened.len()];
    let mut large = Large::default();
    for (&(file, ..), seen) in jobs.iter().zip(results) {
        let Some(seen) = seen? else { continue };
        found.checked_bytes += seen.checked;
        found.unchecked_bytes += seen.unchecked;
        large.add(file, &seen.large, &seen.broken);
        seen.faults.into_iter().for_each(|fault| found.add(fault));
        if let Some(crc) = crcs.get_mut(file) {
            *crc = crc32_join(*crc, seen.crc, seen.bytes);
        }
    }
    for (file, item) in large.whole() {
        if let Some(fault) = opened.get(file).and_then(|file| file.look_through_whole(item)) {
            found.add(fault);
        }
        progress.add(0)?;
    }
    for (file, crc) in opened.iter().zip(crcs) {
        file.finish(crc, found);
    }
    Ok(())
}

fn open<'f>(folder: &Folder, file: &'f FileOf<'f>, found: &mut Verified) -> Option<Opened<'f>> {
    let name = file.name.as_str();
    let open = match open_file(folder, name) {
        Ok(open) => open,
        Err(error) => {
            found.of_file(folder, name, error);
            return None;
        }
    };
    if open.size() != file.bytes {
        let code = if open.size() < file.bytes { Code::Truncated } else { Code::InvalidItem };
        let what = format!("has {} bytes, {} were written", open.size(), file.bytes);
        found.of_file(folder, name, Error::new(code, what));
    }
    let path = shown(&open.path);
    let spans = cut(&file.items, open.size(), |number, error| {
        let Some(item) = file.items.get(number) else { return };
        let error = error.at(&path).within(format!("{:?}", item.named.name));
        let (name, offset) = (Some(item.named.name.clone()), Some(item.chunk.offset));
        found.add(Fault { file: file.name.clone(), name, offset, error });
    });
    match Reader::new(open) {
        Ok(reader) => Some(Opened { file, reader, spans }),
        Err(error) => {
            found.of_file(folder, name, error);
            None
        }
    }
}

fn open_file(folder: &Folder, name: &str) -> Result<OpenFile> {
    forebay_format::dcp::metadata::check_relative_path(name)?;
    folder.open(name).map_err(|error| match error.code() {
        Code::NotFound => Error::new(Code::MissingFile, "the data file is not there")
            .hint("copy it again from where the checkpoint is whole"),
        _ => error,
    })
}

fn jobs_of(opened: &[Opened<'_>]) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (number, file) in opened.iter().enumerate() {
        let (mut first, mut bytes) = (0, 0);
        for (at, span) in file.spans.iter().enumerate() {
            if bytes > 0 && bytes + span.len > JOB_BYTES {
                jobs.push((number, first, at));
                (first, bytes) = (at, 0);
            }
            bytes += span.len;
        }
        if bytes > 0 {
            jobs.push((number, first, file.spans.len()));
        }
    }
    jobs
}

fn look(opened: &[Opened<'_>], job: Job, buffers: &Mutex<Vec<Buffer>>) -> Seen {
    let (number, first, after) = job;
    let Some(file) = opened.get(number) else { return Seen::default() };
    let spans = file.spans.get(first..after).unwrap_or_default();
    let pool = || buffers.lock().unwrap_or_else(PoisonError::into_inner);
    let mut buffer = pool().pop().unwrap_or_default();
    let seen = file.look(spans, &mut buffer);
    pool().push(buffer);
    seen
}

impl Opened<'_> {
    fn look(&self, spans: &[Span], buffer: &mut Buffer) -> Seen {
        let mut seen = Seen::default();
        let (Some(first), Some(last)) = (spans.first(), spans.last()) else { return seen };
        seen.bytes = last.offset + last.len - first.offset;
        if let Err(error) = self.reader.read(first.offset, seen.bytes, buffer) {
            // Which of them cannot be read is worth the second try.
            for span in spans {
                if let Err(error) = self.reader.read(span.offset, span.len, buffer) {
                    seen.broken.push(span.item);
                    seen.faults.push(self.fault(span, span.offset, error));
                }
            }
            if seen.faults.is_empty() {
                seen.faults.push(self.fault(first, first.offset, error));
            }
            return seen;
        }
        for span in spans {
            let start = (span.offset - first.offset) as usize;
            let bytes = buffer.read().get(start..start + span.len as usize).unwrap_or_default();
            self.compare(span, bytes, &mut seen);
        }
        seen
    }

    fn compare(&self, span: &Span, bytes: &[u8], seen: &mut Seen) {
        let result = match span.kind {
            Kind::Block(crc) => self.compare_block(span, bytes, crc, seen),
            kind => {
                if self.file.crc.is_some() {
                    seen.crc = crc32_join(seen.crc, crc32(bytes), span.len);
                }
                match kind {
                    Kind::Gap => zeros(bytes),
                    Kind::Head | Kind::Tail => self.compare_glue(span, bytes),
                    Kind::Block(_) | Kind::Free => Ok(()),
                }
            }
        };
        match span.kind == Kind::Free && self.file.crc.is_none() {
            true => seen.unchecked += span.len,
            false => seen.checked += span.len,
        }
        if let Err((at, error)) = result {
            seen.faults.push(self.fault(span, span.offset + at, error));
        }
    }

    fn compare_block(&self, span: &Span, bytes: &[u8], crc: u32, seen: &mut Seen) -> Outcome {
        let own = crc32(bytes);
        if self.file.crc.is_some() {
            seen.crc = crc32_join(seen.crc, own, span.len);
        }
        match own == crc {
            true => self.look_through(span, bytes, seen).map_err(|error| (0, error)),
            false => {
                seen.broken.push(span.item);
                let what = format!(
                    "{} bytes from byte {} on have the checksum {own:08x}, {crc:08x} was written",
                    span.len, span.offset
                );
                Err((0, Error::new(Code::Checksum, what)))
            }
        }
    }

    /// Looks through the pickle of an object: that it is as it was written does not say that a restore takes it. One of
    /// several blocks is left for later.
    fn look_through(&self, block: &Span, bytes: &[u8], seen: &mut Seen) -> Result<()> {
        let Some(item) = self.file.items.get(block.item) else { return Ok(()) };
        let chunk = &item.chunk;
        let first = chunk.data.as_ref().is_some_and(|data| data.offset == block.offset);
        if !first || item.named.value != Value::Object {
            return Ok(());
        }
        if (block.offset, block.len) != (chunk.offset, chunk.length) {
            seen.large.push(block.item);
            return Ok(());
        }
        let whole = dcp::ItemSpan { offset: 0, length: block.len, transforms: &chunk.transforms };
        dcp::check_object(&bytes.to_vec(), whole)
    }

    /// Looks through an object of several blocks.
    fn look_through_whole(&self, number: usize) -> Option<Fault> {
        let chunk = &self.file.items.get(number)?.chunk;
        let error = dcp::check_object(self.reader.open.as_ref(), span(chunk)).err()?;
        Some(self.fault_of(Some(number), chunk.offset, error))
    }

    /// Compares the archive around a tensor with what is written there.
    fn compare_glue(&self, span: &Span, bytes: &[u8]) -> Outcome {
        let Some(item) = self.file.items.get(span.item) else { return Ok(()) };
        let Some((head, tail)) = item.glue() else {
            return self.parse_glue(item).map_err(|error| (0, error));
        };
        let expected = if span.kind == Kind::Head { head } else { tail };
        let pairs = expected.iter().zip(bytes);
        let Some(at) = pairs.into_iter().position(|(a, b)| a != b) else { return Ok(()) };
        let what = format!(
            "byte {} of the archive around the tensor is not what was written",
            span.offset + at as u64
        );
        Err((at as u64, Error::new(Code::InvalidItem, what)))
    }

    /// Of an archive that is not made as those of this version: that torch would read it.
    fn parse_glue(&self, item: &Item<'_>) -> Result<()> {
        match &item.named.value {
            Value::Tensor(tensor) => {
                let place = span(&item.chunk);
                verify_tensor(
                    self.reader.open.as_ref(),
                    place,
                    tensor.dtype,
                    &item.chunk.region.sizes,
                )
            }
            _ => Ok(()),
        }
    }

    fn fault(&self, span: &Span, offset: u64, error: Error) -> Fault {
        self.fault_of((span.kind != Kind::Gap).then_some(span.item), offset, error)
    }

    fn fault_of(&self, item: Option<usize>, offset: u64, error: Error) -> Fault {
        let item = item.and_then(|item| self.file.items.get(item));
        let name = item.map(|item| item.named.name.clone());
        let mut error = error.at(shown(&self.reader.open.path));
        if let Some(name) = &name {
            error = error.within(format!("{name:?}"));
        }
        Fault { file: self.file.name.clone(), name, offset: Some(offset), error }
    }

    /// Compares the whole; says where the file was changed meanwhile.
    fn finish(&self, crc: u32, found: &mut Verified) {
        let file = &self.file.name;
        let whole = self.reader.open.size() == self.file.bytes;
        let known = found.faults.iter().any(|fault| fault.file == *file);
        if let Some(wanted) = self.file.crc.filter(|&wanted| whole && !known && wanted != crc) {
            let what = format!("the file has the checksum {crc:08x}, {wanted:08x} was written");
            let error = Error::new(Code::Checksum, what).at(shown(&self.reader.open.path));
            found.add(Fault { file: file.clone(), name: None, offset: None, error });
        }
        if let Err(error) = self.reader.check_unchanged() {
            found.add(Fault { file: file.clone(), name: None, offset: None, error });
        }
        // Ranges that were read side by side share pages, which neither could drop.
        self.reader.forget(0, self.reader.open.size());
    }
}

/// What a comparison found: where in the span, and what.
type Outcome = Result<(), (u64, Error)>;

fn zeros(bytes: &[u8]) -> Outcome {
    match bytes.iter().position(|&byte| byte != 0) {
        None => Ok(()),
        Some(at) => {
            let what = "bytes between items are not zero";
            Err((at as u64, Error::new(Code::InvalidItem, what)))
        }
    }
}
