//! Reads by threads: page-cache copy, buffered, and direct without io_uring. **unsafe**: it writes to host targets.
//!
//! A reader takes a piece and fills a slot of staging memory with it. For a GPU the slot goes to the pump, which queues
//! the copy and gives the slot back; the reader meanwhile fills another. On the host there is nothing to overlap: whole
//! runs are read straight into their targets, and only short rows go through a slot.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forebay_device::{Device, Slot};
use forebay_error::{Code, Error, Result};

use super::{remote, scatter};
use crate::plan::{GAP_BYTES, Piece};
use crate::pump::Loaded;
use crate::queue::Work;
use crate::report::Path;
use crate::route::{Cold, Known, Refused, refuse};
use crate::shared::{Shared, internal};
use crate::source::{DirectFile, DirectRefusal, LocalFile, RangeSource, read_exact_at};
use crate::verify;

/// Works until nothing is left.
pub(crate) fn run(shared: &Arc<Shared>) -> Result<()> {
    let host = !shared.engine.device().is_gpu();
    while let Some(work) = shared.queue.take_copy(&|| shared.yield_slots()) {
        let Some((index, piece, way)) = way_of(shared, work)? else { continue };
        if host && way.direct.is_none() && read_in_place(shared, piece)? {
            verify::count(shared, piece, false);
            shared.finish_piece(index, way.path)?;
            continue;
        }
        let mut slot = match shared.slots.take(shared.engine.arena()?, &|| shared.is_over()) {
            Ok(slot) => slot,
            Err(error) if error.code() == Code::Cancelled => return Ok(()),
            Err(error) => return Err(error),
        };
        let by_gpu = shared.checks.take_from(&shared.plan, piece);
        let head = read_staged(shared, piece, way, &mut slot, by_gpu)?;
        deliver(shared, Loaded { slot, piece: index, head, path: way.path, by_gpu })?;
    }
    Ok(())
}

/// From a filled slot, whose checksums are right or left to the GPU, to the targets: by the pump to a GPU, here and now
/// to the host.
pub(crate) fn deliver(shared: &Shared, loaded: Loaded) -> Result<()> {
    match shared.engine.device() {
        Device::Cuda(_) => shared.queue.push_loaded(loaded),
        Device::Host => {
            let piece = shared.piece(loaded.piece)?;
            // SAFETY: the slot holds the piece from `head` on.
            unsafe { scatter::to_host(shared, piece, loaded.slot.address() + loaded.head)? };
            shared.slots.put(loaded.slot);
            verify::count(shared, piece, false);
            shared.finish_piece(loaded.piece, loaded.path)?;
        }
    }
    Ok(())
}

/// Whether the page cache holds the pieces' whole range.
pub(crate) fn range_is_resident(shared: &Shared, file: &LocalFile, pieces: &[u32]) -> Result<bool> {
    if pieces.is_empty() {
        return Ok(true);
    }
    let (offset, len) = shared.span(pieces)?;
    match forebay_topology::residency::probe(file.file(), offset, len) {
        Ok(resident) => Ok(resident.is_resident()),
        Err(error) => {
            tracing::debug!(%error, "residency unknown, taken for resident");
            Ok(true)
        }
    }
}

/// The way a piece is read.
#[derive(Clone, Copy)]
struct Way<'a> {
    path: Path,
    direct: Option<&'a DirectFile>,
}

/// Decides for a piece that was taken; `None` when it went to the cold row instead.
fn way_of<'a>(shared: &'a Shared, work: Work) -> Result<Option<(u32, &'a Piece, Way<'a>)>> {
    let (Work::Warm(index) | Work::Cold(index)) = work;
    let piece = shared.piece(index)?;
    let route = shared.route(piece.object)?;
    let Some(file) = shared.source(piece.object)?.local() else {
        return Ok(Some((index, piece, Way { path: route.warm_path, direct: None })));
    };
    let warm = match (work, route.known) {
        (Work::Warm(_), Known::Resident) => true,
        (Work::Warm(_), Known::No) => range_is_resident(shared, file, &[index])?,
        _ => false,
    };
    let buffered = Way { path: Path::Buffered, direct: None };
    let way = match route.cold() {
        _ if warm => Way { path: route.warm_path, direct: None },
        // Packed rows are too short for direct reads.
        _ if piece.packed => buffered,
        Cold::Ring => {
            shared.queue.push_cold(&[index]);
            return Ok(None);
        }
        Cold::Threads => match file.direct() {
            Ok(direct) => Way { path: Path::DirectThreads, direct: Some(direct) },
            Err(refusal) => {
                refuse_direct(shared, piece, refusal)?;
                buffered
            }
        },
        Cold::Buffered => buffered,
    };
    Ok(Some((index, piece, way)))
}

/// Reads a piece into a slot, and checks what is not left to the GPU; returns where in the slot its first byte lies.
fn read_staged(
    shared: &Shared,
    piece: &Piece,
    way: Way<'_>,
    slot: &mut Slot,
    by_gpu: bool,
) -> Result<usize> {
    let source = shared.source(piece.object)?.as_ref();
    if source.local().is_none() {
        return remote::read_staged(shared, piece, slot, by_gpu).map(|()| 0);
    }
    if piece.packed {
        for op in shared.plan.ops_of(piece) {
            for row in 0..op.part.rows {
                let at = (op.staged + row * op.staged_stride) as usize;
                let bytes = slot.bytes_mut(at + op.part.run as usize);
                let Some(into) = bytes.get_mut(at..) else {
                    return Err(internal("packed row leaves its slot"));
                };
                read_exact_at(source, into, op.part.from + row * op.part.from_stride)?;
            }
        }
        return Ok(0);
    }
    if let Some(direct) = way.direct {
        match read_direct(source, piece, direct, slot)? {
            Some(head) => {
                let bytes = slot.bytes(head + piece.len as usize);
                verify::staged(shared, piece, bytes.get(head..).unwrap_or_default(), by_gpu)?;
                return Ok(head);
            }
            None => refuse_direct(shared, piece, &refused_at_read())?,
        }
    }
    let bytes = slot.bytes_mut(piece.len as usize);
    if verify::for_cpu(&shared.plan, piece, by_gpu).next().is_none() {
        read_exact_at(source, bytes, piece.offset)?;
        return Ok(0);
    }
    // Block by block: what was just read is in the processor's own cache, of which a piece is the double.
    for (check, places) in shared.plan.landings_of(piece) {
        let at = (check.offset - piece.offset) as usize;
        let Some(into) = bytes.get_mut(at..at + check.len as usize) else {
            return Err(internal("a block leaves its piece"));
        };
        read_exact_at(source, into, check.offset)?;
        if !by_gpu || places.is_empty() {
            verify::verify(shared, check, into)?;
        }
    }
    Ok(0)
}

/// One direct read by this thread. `None`: O_DIRECT is refused after all.
fn read_direct(
    source: &dyn RangeSource,
    piece: &Piece,
    direct: &DirectFile,
    slot: &mut Slot,
) -> Result<Option<usize>> {
    let align = u64::from(direct.align.offset_bytes.max(1));
    let start = piece.offset / align * align;
    let head = (piece.offset - start) as usize;
    let len = (head as u64 + piece.len).next_multiple_of(align) as usize;
    let wanted = head + piece.len as usize;
    if len > slot.len() {
        return Err(internal("direct read leaves its slot"));
    }
    let bytes = slot.bytes_mut(len);
    let got = match direct.file.read_at(bytes, start) {
        Ok(got) => got,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
        Err(error) => {
            let what = format!("cannot read {len} bytes at byte {start} directly");
            return Err(Error::io(what, error).at(source.name()));
        }
    };
    if got < wanted {
        // Short: the rest through the page cache, which also finds an early end.
        let rest = got.max(head);
        if let Some(into) = bytes.get_mut(rest..wanted) {
            read_exact_at(source, into, start + rest as u64)?;
        }
    }
    Ok(Some(head))
}

/// The refusal that shows at the first read only.
pub(crate) fn refused_at_read() -> DirectRefusal {
    DirectRefusal { by_file_system: true, why: "EINVAL at the first direct read".to_owned() }
}

/// Switches an object to buffered reads, and the rest of its file system too where that is the one that refuses.
pub(crate) fn refuse_direct(shared: &Shared, piece: &Piece, refusal: &DirectRefusal) -> Result<()> {
    shared.route(piece.object)?.set_cold(Cold::Buffered);
    let source = shared.source(piece.object)?;
    if let Some(file) = source.local() {
        if refusal.by_file_system {
            refuse(Refused::Direct, file.device(), &refusal.why);
        }
        let (kind, why) = (&file.profile().kind, &refusal.why);
        shared.tally.refusal(&format!("{kind}: {why}; reading through the page cache"));
        shared.tally.reason(Path::Buffered, &format!("not resident; {why}"));
    }
    Ok(())
}

/// Whether every run is long enough to be read by itself, straight into its target; and where there are checksums,
/// each run is one block of them, which can then be checked where it landed.
fn is_read_in_place(shared: &Shared, piece: &Piece) -> bool {
    if !piece.checks.is_empty() {
        let (ops, checks) = (shared.plan.ops_of(piece), shared.plan.checks_of(piece));
        return ops.len() == checks.len()
            && ops.iter().zip(checks).all(|(op, check)| {
                op.part.rows == 1 && op.part.from == check.offset && op.part.run == check.len
            });
    }
    let long = |run: u64, rows: u64| rows == 1 || run >= GAP_BYTES;
    shared.plan.ops_of(piece).iter().all(|op| long(op.part.run, op.part.rows))
}

/// Reads each run of a piece into its host target; false where it is to go through a slot.
fn read_in_place(shared: &Shared, piece: &Piece) -> Result<bool> {
    let source = shared.source(piece.object)?.as_ref();
    if source.local().is_none() {
        return remote::read_in_place(shared, piece);
    }
    if !is_read_in_place(shared, piece) {
        return Ok(false);
    }
    let checks = shared.plan.checks_of(piece);
    for (number, op) in shared.plan.ops_of(piece).iter().enumerate() {
        let part = &op.part;
        let target = shared.address(part.target)? + part.to;
        for row in 0..part.rows {
            let to = (target + row * part.to_stride) as *mut u8;
            // SAFETY: the plan checked that the row lies in its target, which is valid and unused by the contract of
            // `Session::provide`; bytes need no initialisation to be written.
            let into = unsafe { std::slice::from_raw_parts_mut(to, part.run as usize) };
            read_exact_at(source, into, part.from + row * part.from_stride)?;
            if let Some(check) = checks.get(number) {
                verify::verify(shared, check, into)?;
            }
        }
    }
    Ok(true)
}
