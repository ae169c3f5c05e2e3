//! Tensors that lie in pieces: which bytes of which file go where in a row-major target, and how to read them without
//! the engine.

use crate::catalog::{Catalog, Check, Fault, Piece, Stored, TensorEntry};
use crate::open_file::OpenFile;
use crate::torch_zip::buffer;
use forebay_error::{Code, Error, Result};
use forebay_tensor::{CopyRows, CopyRuns, Region, Strides, byte_len, copy_runs_strided};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Bytes of a tensor that are assembled at a time. Rows of a transposed tensor of 16,384 columns of two bytes come in
/// runs of 4 KiB then.
const SLAB_BYTES: u64 = 64 << 20;

/// Bytes read at a time.
const READ_BYTES: u64 = 1 << 20;

/// Gaps up to this are read through.
const GAP_BYTES: u64 = 16 << 10;

/// What one piece gives to a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Which of the catalog's files.
    pub file: usize,
    /// The copy, counted in the file from its first byte on. Its loops are in the order of the file, so that the file
    /// is read forwards once, whatever the order of the target; but for loops that repeat bytes, which are outermost.
    pub runs: CopyRuns,
}

impl Placed {
    /// Byte after the last that is read.
    fn end(&self) -> Option<u64> {
        self.runs.dims.iter().try_fold(self.runs.from.checked_add(self.runs.run)?, |end, dim| {
            (dim.count - 1).checked_mul(dim.from_stride).and_then(|steps| end.checked_add(steps))
        })
    }
}

impl TensorEntry {
    /// The copies that make a region of the tensor, row-major; `None` is all of it.
    ///
    /// Errors: that for which its item could not be opened; `misaligned` for a region of elements below a byte that
    /// does not fall on bytes, `overflow` where a place leaves 64 bits.
    pub fn gathers(&self, region: Option<&Region>) -> Result<Vec<Placed>> {
        let whole = Region::whole(&self.shape);
        let region = region.unwrap_or(&whole);
        let run;
        let pieces = match &self.stored {
            Stored::Pieces(pieces) => pieces,
            Stored::Run => {
                let (file, offset) = (self.file, self.offset);
                run = vec![Piece { region: whole.clone(), file, offset, strides: None }];
                &run
            }
            Stored::Unopened(fault) => return Err(self.unopened(fault.as_ref())),
        };
        let mut placed = Vec::new();
        for piece in pieces {
            let memory = match &piece.strides {
                Some(strides) => Strides { offset: 0, strides: strides.clone() },
                None => Strides::row_major(&piece.region.sizes),
            };
            let runs = copy_runs_strided(self.dtype, &piece.region, &memory, region)?;
            let Some(mut runs) = runs else { continue };
            let overflow = || Error::new(Code::Overflow, "a place in a tensor leaves 64 bits");
            runs.from = runs.from.checked_add(piece.offset).ok_or_else(overflow)?;
            // Stable, so that loops of one stride keep their order.
            let stride = |stride: u64| if stride == 0 { u64::MAX } else { stride };
            runs.dims.sort_by_key(|dim| std::cmp::Reverse(stride(dim.from_stride)));
            let one = Placed { file: piece.file, runs };
            one.end().ok_or_else(overflow)?;
            placed.push(one);
        }
        Ok(placed)
    }

    /// The error for a tensor whose item is not open.
    fn unopened(&self, fault: Option<&Fault>) -> Error {
        match fault {
            Some(fault) => fault.error(),
            None => Error::new(Code::Internal, "the tensor was listed, its item was not opened"),
        }
        .at(format!("tensor {}", crate::text::quoted(&self.name)))
    }

    /// The bytes of files that it can touch: (file, first byte, byte after the last).
    pub fn extents(&self) -> Result<Vec<(usize, u64, u64)>> {
        if self.stored == Stored::Run {
            return Ok(vec![(self.file, self.offset, self.offset.saturating_add(self.bytes))]);
        }
        let extent =
            |placed: &Placed| (placed.file, placed.runs.from, placed.end().unwrap_or(u64::MAX));
        Ok(self.gathers(None)?.iter().map(extent).collect())
    }
}

/// A tensor's row-major bytes, handed over one after another in bounded memory.
pub fn read_tensor(
    files: &[Arc<OpenFile>],
    entry: &TensorEntry,
    mut each: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    if entry.stored == Stored::Run {
        let file = file_of(files, entry.file)?;
        let mut piece = buffer(entry.bytes.min(READ_BYTES))?;
        let mut done = 0;
        while done < entry.bytes {
            let len = (entry.bytes - done).min(READ_BYTES) as usize;
            let Some(part) = piece.get_mut(..len) else { break };
            file.read_exact_at(part, entry.offset.saturating_add(done))?;
            each(part)?;
            done += len as u64;
        }
        return Ok(());
    }
    for slab in slabs(&entry.shape, entry.dtype.bits().div_ceil(8)) {
        let mut bytes = buffer(byte_len(entry.dtype, &slab.sizes)?)?;
        for placed in entry.gathers(Some(&slab))? {
            read_placed(file_of(files, placed.file)?, &placed, &mut bytes)?;
        }
        each(&bytes)?;
    }
    Ok(())
}

/// SHA-256 of a tensor's row-major bytes.
pub fn sha256_tensor(files: &[Arc<OpenFile>], entry: &TensorEntry) -> Result<[u8; 32]> {
    let mut hasher = Sha256::new();
    read_tensor(files, entry, |bytes| {
        hasher.update(bytes);
        Ok(())
    })?;
    Ok(hasher.finalize().into())
}

/// Compares the checksums that a catalog has of bytes that these tensors lie in with the files. `each` is called with
/// the bytes of each piece that was read, from several threads; its error ends the check. Returns how many checksums
/// there were and of how many bytes. A tensor may lie in bytes without one.
///
/// Errors: `checksum`, which names file, byte and tensors; what reading gives; what [`TensorEntry::gathers`] gives.
pub fn verify_checks(
    catalog: &Catalog,
    files: &[Arc<OpenFile>],
    tensors: &[usize],
    each: impl Fn(u64) -> Result<()> + Sync,
) -> Result<(usize, u64)> {
    let picked = checks_of(catalog, tensors)?;
    let results = crate::parallel::map(&picked, |check| {
        let file = file_of(files, check.file)?;
        let found = crate::torch_zip::crc_of(file.as_ref(), check.offset, check.bytes, &each)?;
        if found == check.crc {
            return Ok(check.bytes);
        }
        let what = format!(
            "the {} bytes from byte {} on have the CRC-32 {found:08x}, {:08x} is what was saved",
            check.bytes, check.offset, check.crc
        );
        let names = touching(catalog, check.file, check.offset, check.bytes);
        let place = format!("{}{names}", crate::text::shown(&file.path));
        Err(Error::new(Code::Checksum, what).at(place))
    });
    let count = results.len();
    let bytes = results.into_iter().try_fold(0_u64, |sum, bytes| bytes.map(|bytes| sum + bytes))?;
    Ok((count, bytes))
}

/// The checksums of bytes that these tensors lie in.
fn checks_of(catalog: &Catalog, tensors: &[usize]) -> Result<Vec<Check>> {
    let mut wanted = vec![false; catalog.checks.len()];
    for entry in tensors.iter().filter_map(|&tensor| catalog.tensors.get(tensor)) {
        for (file, start, end) in entry.extents()? {
            // Checks are in order and do not overlap.
            let first = catalog
                .checks
                .partition_point(|check| (check.file, check.offset + check.bytes) <= (file, start));
            let touched = catalog.checks.iter().zip(&mut wanted).skip(first);
            touched
                .take_while(|(check, _)| (check.file, check.offset) < (file, end))
                .for_each(|(_, wanted)| *wanted = true);
        }
    }
    let picked = catalog.checks.iter().zip(&wanted).filter(|(_, wanted)| **wanted);
    Ok(picked.map(|(check, _)| *check).collect())
}

/// `, tensor "a"`: the tensors that lie in these bytes.
fn touching(catalog: &Catalog, file: usize, offset: u64, bytes: u64) -> String {
    let end = offset.saturating_add(bytes);
    let touches = |entry: &&TensorEntry| {
        entry.extents().is_ok_and(|extents| {
            extents.iter().any(|&(of, start, stop)| of == file && start < end && stop > offset)
        })
    };
    let names: Vec<&str> =
        catalog.tensors.iter().filter(touches).map(|entry| entry.name.as_str()).collect();
    match names.as_slice() {
        [] => String::new(),
        [name] => format!(", tensor {}", crate::text::quoted(name)),
        names => format!(", tensors {}", crate::text::listed(names.iter().copied(), 5)),
    }
}

fn file_of(files: &[Arc<OpenFile>], file: usize) -> Result<&Arc<OpenFile>> {
    files.get(file).ok_or_else(|| Error::new(Code::Internal, "a tensor without a file"))
}

/// Reads the runs of a copy into a target.
fn read_placed(file: &OpenFile, placed: &Placed, target: &mut [u8]) -> Result<()> {
    let mut scratch = Vec::new();
    placed.runs.rows().try_for_each(|rows| read_rows(file, &rows, &mut scratch, target))
}

/// Reads rows: many at once where they lie close together, else one by one.
fn read_rows(
    file: &OpenFile,
    rows: &CopyRows,
    scratch: &mut Vec<u8>,
    target: &mut [u8],
) -> Result<()> {
    let together = match rows.from_stride - rows.run <= GAP_BYTES {
        true => (READ_BYTES.saturating_sub(rows.run) / rows.from_stride + 1).min(rows.rows),
        false => 1,
    };
    let mut done = 0;
    while done < rows.rows {
        let count = together.min(rows.rows - done);
        let (from, to) = (rows.from + done * rows.from_stride, rows.to + done * rows.to_stride);
        let short = || Error::new(Code::Internal, "a strided copy leaves its target");
        let into = target.get_mut(to as usize..).ok_or_else(short)?;
        if count == 1 {
            let into = into.get_mut(..rows.run as usize).ok_or_else(short)?;
            file.read_exact_at(into, from)?;
        } else {
            scratch.resize(((count - 1) * rows.from_stride + rows.run) as usize, 0);
            file.read_exact_at(scratch, from)?;
            scatter(scratch, rows, count, into).ok_or_else(short)?;
        }
        done += count;
    }
    Ok(())
}

/// Copies `count` rows from the start of one buffer to the start of another.
fn scatter(source: &[u8], rows: &CopyRows, count: u64, target: &mut [u8]) -> Option<()> {
    let run = rows.run as usize;
    for row in 0..count {
        let (from, to) = ((row * rows.from_stride) as usize, (row * rows.to_stride) as usize);
        target.get_mut(to..to + run)?.copy_from_slice(source.get(from..from + run)?);
    }
    Some(())
}

/// Boxes that follow one another row-major and make up the tensor, each of at most [`SLAB_BYTES`].
fn slabs(shape: &[u64], element: u64) -> Vec<Region> {
    if shape.contains(&0) {
        return Vec::new();
    }
    // The first dimension whose rows fit.
    let row_bytes = |dim: usize| {
        shape.iter().skip(dim + 1).fold(element, |bytes, &side| bytes.saturating_mul(side))
    };
    let Some(dim) = (0..shape.len()).find(|&dim| row_bytes(dim) <= SLAB_BYTES) else {
        return vec![Region::whole(shape)];
    };
    let rows = (SLAB_BYTES / row_bytes(dim)).max(1);
    let mut slabs = Vec::new();
    let mut corner = vec![0_u64; shape.len()];
    loop {
        let mut region = Region::whole(shape);
        for (place, side) in region.sizes.iter_mut().take(dim).enumerate() {
            *side = 1;
            if let Some(offset) = region.offsets.get_mut(place) {
                *offset = corner.get(place).copied().unwrap_or(0);
            }
        }
        let side = shape.get(dim).copied().unwrap_or(1);
        let mut row = 0;
        while row < side {
            let mut slab = region.clone();
            if let (Some(offset), Some(size)) = (slab.offsets.get_mut(dim), slab.sizes.get_mut(dim))
            {
                (*offset, *size) = (row, rows.min(side - row));
            }
            slabs.push(slab);
            row += rows;
        }
        let mut more = false;
        for (at, &side) in corner.iter_mut().zip(shape).take(dim).rev() {
            *at += 1;
            if *at < side {
                more = true;
                break;
            }
            *at = 0;
        }
        if !more {
            return slabs;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_cover_in_order() {
        let whole = |shape: &[u64]| slabs(shape, 4).len();
        assert_eq!((whole(&[]), whole(&[3, 4]), whole(&[0, 4])), (1, 1, 0));
        let rows = slabs(&[5, 8 << 20], 4);
        assert_eq!(rows.iter().map(|slab| slab.sizes[0]).collect::<Vec<_>>(), [2, 2, 1]);
        let deep = slabs(&[2, 1, 3, 16 << 20], 4);
        assert_eq!(deep.len(), 6);
        assert_eq!(deep[4].offsets, [1, 0, 1, 0]);
        assert_eq!(deep.iter().map(Region::elements).sum::<u64>(), 2 * 3 * (16 << 20));
        let long = slabs(&[40 << 20], 4);
        assert_eq!(
            long.iter().map(|slab| slab.offsets[0]).collect::<Vec<_>>(),
            [0, 16 << 20, 32 << 20]
        );
    }
}
