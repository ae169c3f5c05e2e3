//! One save's files: where each item goes, and in which pieces its memory is staged.

use std::collections::VecDeque;

use forebay_engine::stage::{MemoryRun, Place, StagePiece};
use forebay_error::{Code, Error, Result};
use forebay_format::dcp::{FileLayout, LayoutOptions, PlacedItem, Segment, plan_files};

use super::plan::SavePlan;
use crate::model::BLOCK_BYTES;

/// Where a tensor region lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// On the engine's GPU, or in host memory.
    pub place: Place,
    /// Its first byte.
    pub address: u64,
}

/// What a staged piece is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Bytes of one large item, from this one on; a multiple of a block.
    Stretch { item: usize, from: u64 },
    /// Whole small items one after the other: their numbers and bytes.
    Pack(Vec<(usize, u64)>),
}

/// An item of the save, by its number in the list of specs.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    pub(super) file: usize,
    pub(super) item: PlacedItem,
    /// Its first checksum in the list of all.
    pub(super) first_crc: usize,
    /// Pieces that carry its bytes.
    pub(super) pieces: usize,
    /// Segments of its file that hold bytes of it.
    pub(super) segments: std::ops::Range<usize>,
}

/// Files, items and pieces of one save.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) files: Vec<FileLayout>,
    pub(super) items: Vec<Placed>,
    pub(super) crcs: usize,
    pub(super) pieces: Vec<StagePiece>,
    pub(super) runs: Vec<MemoryRun>,
    pub(super) uses: Vec<Use>,
}

impl Files {
    /// Lays out tensors at `sources` and finished `objects`, for slots of `slot_bytes`.
    pub(super) fn new(
        plan: &SavePlan,
        sources: &[Source],
        objects: &[Vec<u8>],
        options: &LayoutOptions,
        slot_bytes: u64,
    ) -> Result<Self> {
        if (sources.len(), objects.len()) != (plan.tensor_count(), plan.object_count()) {
            let what = format!(
                "{} tensors and {} objects for {} and {} that are to be written",
                sources.len(),
                objects.len(),
                plan.tensor_count(),
                plan.object_count()
            );
            return Err(Error::new(Code::Usage, what));
        }
        let files = plan_files(&plan.specs(objects), options)?;
        let (items, crcs) = placed(&files);
        let slot_bytes = (slot_bytes / BLOCK_BYTES * BLOCK_BYTES).max(BLOCK_BYTES);
        let mut out =
            Self { files, items, crcs, pieces: Vec::new(), runs: Vec::new(), uses: Vec::new() };
        out.cut(sources, slot_bytes);
        Ok(out)
    }

    /// Pieces of all files in turn, so that no two writers need one file at a time.
    fn cut(&mut self, sources: &[Source], slot_bytes: u64) {
        let mut rows: Vec<VecDeque<(Place, Use, Vec<MemoryRun>)>> =
            self.files.iter().map(|file| cut_file(file, sources, slot_bytes).into()).collect();
        while rows.iter().any(|row| !row.is_empty()) {
            for (place, use_, runs) in rows.iter_mut().filter_map(VecDeque::pop_front) {
                let first = self.runs.len();
                self.runs.extend(runs);
                self.pieces.push(StagePiece { place, runs: first..self.runs.len() });
                self.uses.push(use_);
            }
        }
        for use_ in &self.uses {
            match use_ {
                Use::Stretch { item, .. } => count_piece(&mut self.items, *item),
                Use::Pack(list) => {
                    list.iter().for_each(|(item, _)| count_piece(&mut self.items, *item));
                }
            }
        }
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len).sum()
    }
}

fn count_piece(items: &mut [Placed], item: usize) {
    if let Some(placed) = items.get_mut(item) {
        placed.pieces += 1;
    }
}

/// Where each item is, in the order of the specs, and how many checksum blocks all have.
pub(super) fn placed(files: &[FileLayout]) -> (Vec<Placed>, usize) {
    let mut items: Vec<Placed> =
        Vec::with_capacity(files.iter().map(|file| file.items.len()).sum());
    for (number, file) in files.iter().enumerate() {
        for item in &file.items {
            let end = item.end();
            let first =
                file.segments.partition_point(|part| part.offset() + part.len() <= item.offset);
            let last = file.segments.partition_point(|part| part.offset() < end);
            items.push(Placed {
                file: number,
                item: item.clone(),
                first_crc: 0,
                pieces: 0,
                segments: first..last,
            });
        }
    }
    items.sort_by_key(|placed| placed.item.index);
    let mut crcs = 0;
    for placed in &mut items {
        placed.first_crc = crcs;
        crcs += placed.item.data_bytes.div_ceil(BLOCK_BYTES) as usize;
    }
    (items, crcs)
}

/// The pieces of one file's tensors.
fn cut_file(
    file: &FileLayout,
    sources: &[Source],
    slot_bytes: u64,
) -> Vec<(Place, Use, Vec<MemoryRun>)> {
    let mut out = Vec::new();
    let mut packs = [Pack::new(Place::Device), Pack::new(Place::Host)];
    for item in file.items.iter().filter(|item| item.data_bytes > 0) {
        let Some(source) = sources.get(item.index) else { continue };
        if item.body_bytes > 0 || item.data_bytes > slot_bytes {
            let mut from = 0;
            while from < item.data_bytes {
                let len = slot_bytes.min(item.data_bytes - from);
                let run = MemoryRun { address: source.address + from, len };
                out.push((source.place, Use::Stretch { item: item.index, from }, vec![run]));
                from += len;
            }
            continue;
        }
        let Some(pack) = packs.iter_mut().find(|pack| pack.place == source.place) else {
            continue;
        };
        if pack.bytes + item.data_bytes > slot_bytes {
            out.extend(pack.take());
        }
        pack.items.push((item.index, item.data_bytes));
        pack.runs.push(MemoryRun { address: source.address, len: item.data_bytes });
        pack.bytes += item.data_bytes;
    }
    out.extend(packs.iter_mut().filter_map(Pack::take));
    out
}

/// Small items that are staged as one piece.
struct Pack {
    place: Place,
    items: Vec<(usize, u64)>,
    runs: Vec<MemoryRun>,
    bytes: u64,
}

impl Pack {
    fn new(place: Place) -> Self {
        Self { place, items: Vec::new(), runs: Vec::new(), bytes: 0 }
    }

    /// What has come together, as a piece; nothing if nothing has.
    fn take(&mut self) -> Option<(Place, Use, Vec<MemoryRun>)> {
        let full = std::mem::replace(self, Self::new(self.place));
        (!full.items.is_empty()).then_some((full.place, Use::Pack(full.items), full.runs))
    }
}

/// Whether a segment is glue.
pub(super) fn is_glue(segment: &Segment) -> bool {
    matches!(segment, Segment::Glue { .. })
}
