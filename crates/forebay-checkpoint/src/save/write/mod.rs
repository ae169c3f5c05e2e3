//! From staged pieces to files: checksums, bodies, and glue as soon as all that it is made of is there.
//!
//! Pieces come in any order. Each item counts the pieces that it lacks; when the last has come its CRC is joined from
//! its blocks. Each segment of glue counts the items that it lacks; when the last is complete it is rendered and
//! written. What an item left for glue (all of a small one, the last bytes of a large one) is kept until its last
//! segment was written, so memory is bounded by what is in flight and not by the number of items.
//!
//! | module | what |
//! | --- | --- |
//! | `gate` | the files, which come later than the first pieces |
//! | `sums` | checksums of blocks, bodies and files |

mod gate;
mod sums;

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_engine::stage::StageConsumer;
use forebay_engine::write_all_at;
use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_format::dcp::GlueSource;

use super::files::{Files, Placed, Use, is_glue};
use crate::model::BLOCK_BYTES;
use gate::Gate;
pub(super) use gate::OpenFiles;
use sums::Sums;

/// What becomes of one item.
#[derive(Default)]
struct ItemState {
    pieces_left: AtomicUsize,
    segments_left: AtomicUsize,
    crc: AtomicU32,
    /// CRC of what the last block gives to the body, where the body ends inside of that block.
    body_end_crc: AtomicU32,
    /// Bytes that go into glue, from [`forebay_format::dcp::PlacedItem::body_bytes`] on.
    loose: Mutex<Vec<u8>>,
}

/// Writes one save's files.
pub(super) struct Writer {
    pub(super) files: Files,
    objects: Vec<Vec<u8>>,
    items: Vec<ItemState>,
    sums: Sums,
    /// For each file and segment, items that are not complete.
    segments: Vec<Vec<AtomicUsize>>,
    gate: Gate,
}

impl Writer {
    pub(super) fn new(files: Files, objects: Vec<Vec<u8>>) -> Self {
        let segments = files
            .files
            .iter()
            .map(|file| file.segments.iter().map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
        let segments: Vec<_> = segments.collect();
        let mut items = Vec::with_capacity(files.items.len());
        for placed in &files.items {
            let glue = glue_of(&files, placed);
            for number in glue.clone() {
                if let Some(left) = segments.get(placed.file).and_then(|row| row.get(number)) {
                    left.fetch_add(1, Ordering::Relaxed);
                }
            }
            items.push(ItemState {
                pieces_left: AtomicUsize::new(placed.pieces),
                segments_left: AtomicUsize::new(glue.count()),
                ..ItemState::default()
            });
        }
        let sums = Sums::new(&files);
        Self { files, objects, items, sums, segments, gate: Gate::new() }
    }

    /// Hands over the files; writing may begin. Items that need no staging are written here.
    pub(super) fn open(&self, files: OpenFiles) -> Result<()> {
        self.gate.open(files);
        for number in 0..self.items.len() {
            let done = self.files.items.get(number).is_some_and(|placed| placed.pieces == 0);
            if done {
                self.check_object(number);
                self.complete(number)?;
            }
        }
        Ok(())
    }

    /// There will be no files: whoever waits for them goes home.
    pub(super) fn give_up(&self) {
        self.gate.give_up();
    }

    /// Lets go of the files, once nobody writes any more.
    pub(super) fn close(&self) {
        self.gate.close();
    }

    /// Makes everything durable.
    pub(super) fn seal(&self) -> Result<()> {
        self.gate.seal()
    }

    /// The checksums of an item's blocks.
    pub(super) fn crcs(&self, number: usize) -> Vec<u32> {
        self.files.items.get(number).map(|placed| self.sums.blocks(placed)).unwrap_or_default()
    }

    /// The CRC of a whole file, once everything is written.
    pub(super) fn file_crc(&self, file: usize) -> Option<u32> {
        self.sums.file(self.files.files.get(file)?, file)
    }

    fn stretch(&self, number: usize, from: u64, bytes: &[u8]) -> Result<()> {
        let placed = self.placed(number)?;
        let files = self.gate.wait()?;
        let file = files.get(placed.file).ok_or_else(|| internal("no such file"))?;
        self.sums.see(placed, from / BLOCK_BYTES, bytes);
        let body = placed.item.body_bytes.saturating_sub(from).min(bytes.len() as u64) as usize;
        let (body, loose) = bytes.split_at(body);
        let inside = body.len() % BLOCK_BYTES as usize;
        if inside > 0 && !loose.is_empty() {
            let end = body.get(body.len() - inside..).unwrap_or_default();
            self.state(number)?.body_end_crc.store(crc32(end), Ordering::Release);
        }
        if !body.is_empty() {
            let offset = placed.item.data_offset + from;
            write_all_at(file.sink(), body, offset)?;
            file.sink().flush_soon(offset, body.len() as u64);
        }
        if !loose.is_empty() {
            let skip = (from + body.len() as u64 - placed.item.body_bytes) as usize;
            self.keep(number, skip, loose)?;
        }
        self.piece_done(number)
    }

    fn small(&self, number: usize, bytes: &[u8]) -> Result<()> {
        let placed = self.placed(number)?;
        self.sums.see(placed, 0, bytes);
        self.keep(number, 0, bytes)?;
        self.piece_done(number)
    }

    fn keep(&self, number: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let mut loose = lock(&self.state(number)?.loose);
        if loose.len() < at + bytes.len() {
            loose.resize(at + bytes.len(), 0);
        }
        if let Some(into) = loose.get_mut(at..at + bytes.len()) {
            into.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn check_object(&self, number: usize) {
        let Some(placed) = self.files.items.get(number) else { return };
        let Some(bytes) = self.object(number) else { return };
        self.sums.see(placed, 0, bytes);
    }

    fn piece_done(&self, number: usize) -> Result<()> {
        match self.state(number)?.pieces_left.fetch_sub(1, Ordering::AcqRel) {
            1 => self.complete(number),
            _ => Ok(()),
        }
    }

    /// All bytes of an item have come: its CRC is known, and glue that waited for it is written.
    fn complete(&self, number: usize) -> Result<()> {
        let placed = self.placed(number)?;
        let layout = self.files.files.get(placed.file).ok_or_else(|| internal("no such file"))?;
        let state = self.state(number)?;
        state.crc.store(self.sums.whole(placed), Ordering::Release);
        self.sums.note_body(layout, placed, state.body_end_crc.load(Ordering::Acquire));
        for segment in glue_of(&self.files, placed) {
            let row = self.segments.get(placed.file).and_then(|row| row.get(segment));
            if row.is_some_and(|left| left.fetch_sub(1, Ordering::AcqRel) == 1) {
                self.write_glue(placed.file, segment)?;
            }
        }
        Ok(())
    }

    fn write_glue(&self, file: usize, number: usize) -> Result<()> {
        let files = self.gate.wait()?;
        let layout = self.files.files.get(file).ok_or_else(|| internal("no such file"))?;
        let segment = layout.segments.get(number).ok_or_else(|| internal("no such segment"))?;
        let sink = files.get(file).ok_or_else(|| internal("no such file"))?.sink();
        let mut bytes = vec![0; segment.len() as usize];
        layout.glue(segment, self, &mut bytes)?;
        write_all_at(sink, &bytes, segment.offset())?;
        self.sums.note_segment(file, number, crc32(&bytes));
        sink.flush_soon(segment.offset(), segment.len());
        let (start, end) = (segment.offset(), segment.offset() + segment.len());
        let first = layout.items.partition_point(|item| item.end() <= start);
        for item in layout.items.iter().skip(first).take_while(|item| item.offset < end) {
            let state = self.state(item.index)?;
            if state.segments_left.fetch_sub(1, Ordering::AcqRel) == 1 {
                *lock(&state.loose) = Vec::new();
            }
        }
        Ok(())
    }

    fn placed(&self, number: usize) -> Result<&Placed> {
        self.files.items.get(number).ok_or_else(|| internal("no such item"))
    }

    fn state(&self, number: usize) -> Result<&ItemState> {
        self.items.get(number).ok_or_else(|| internal("no such item"))
    }

    /// The bytes of an object, which come after the tensors.
    fn object(&self, number: usize) -> Option<&Vec<u8>> {
        let first = self.items.len() - self.objects.len();
        self.objects.get(number.checked_sub(first)?)
    }
}

/// The segments of glue that hold bytes of an item.
fn glue_of<'a>(files: &'a Files, placed: &Placed) -> impl Iterator<Item = usize> + Clone + 'a {
    let segments = files.files.get(placed.file).map(|file| file.segments.as_slice());
    let segments = segments.unwrap_or_default();
    placed.segments.clone().filter(|&number| segments.get(number).is_some_and(is_glue))
}

impl StageConsumer for Writer {
    fn take(&self, piece: usize, bytes: &[u8]) -> Result<()> {
        match self.files.uses.get(piece) {
            Some(Use::Stretch { item, from }) => self.stretch(*item, *from, bytes),
            Some(Use::Pack(items)) => {
                let mut rest = bytes;
                for (item, len) in items {
                    let Some((own, after)) = rest.split_at_checked(*len as usize) else {
                        return Err(internal("a pack is shorter than its items"));
                    };
                    self.small(*item, own)?;
                    rest = after;
                }
                Ok(())
            }
            None => Err(internal("no such piece")),
        }
    }
}

impl GlueSource for Writer {
    fn crc(&self, index: usize) -> u32 {
        self.items.get(index).map_or(0, |item| item.crc.load(Ordering::Acquire))
    }

    fn copy(&self, index: usize, from: u64, into: &mut [u8]) -> Result<()> {
        let mut copy = |bytes: &[u8], at: u64| {
            let at = at as usize;
            let own = bytes.get(at..at + into.len()).ok_or_else(|| internal("bytes of glue"))?;
            into.copy_from_slice(own);
            Ok(())
        };
        match self.object(index) {
            Some(bytes) => copy(bytes, from),
            None => {
                let body = self.placed(index)?.item.body_bytes;
                copy(&lock(&self.state(index)?.loose), from - body)
            }
        }
    }
}

pub(super) fn internal(what: &str) -> Error {
    Error::new(Code::Internal, what).hint("this is a fault in Forebay, please report it")
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
