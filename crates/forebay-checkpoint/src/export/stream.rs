//! Reading, casting and writing side by side: one thread reads batches, another hands their pieces to several that cast
//! and write.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use forebay_error::{Code, Error, Result};
use forebay_format::parallel;
use forebay_tensor::Dtype;

use super::cast::cast;
use crate::progress::Progress;
use crate::stream::{Loaded, Loader, SLOTS, Source, batches};

/// Bytes of the source that are cast and written at once: sixteen threads with four bytes for one hold 64 MiB.
const PIECE_BYTES: usize = 1 << 20;

/// Where tensors go.
pub(super) trait Sink: Sync {
    /// What a tensor of the source becomes.
    fn dtype(&self, tensor: usize) -> Option<Dtype>;

    /// Writes some of its bytes, from byte `offset` of the new tensor on.
    fn write(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()>;
}

/// Moves tensors from the source to the sink, in the order given.
pub(super) fn stream(
    source: &Source,
    order: &[usize],
    sink: &impl Sink,
    progress: &impl Progress,
) -> Result<()> {
    let infos = order.iter().filter_map(|&tensor| source.tensors.get(tensor));
    progress.total(infos.fold(0_u64, |sum, info| sum.saturating_add(info.bytes)));
    let mut loader = Loader::new()?;
    // One batch is read, one waits here, one is written.
    let (sender, receiver) = sync_channel::<Loaded>(SLOTS - 2);
    thread::scope(|scope| {
        let writing = thread::Builder::new()
            .name("forebay-export".to_owned())
            .spawn_scoped(scope, move || write_all(source, receiver, sink, progress))
            .map_err(|error| Error::io("cannot start a thread", error))?;
        let mut read = Ok(());
        for batch in batches(&source.tensors, order) {
            let loaded = batch.and_then(|batch| loader.load(source, batch, &|| progress.add(0)));
            match loaded {
                Ok(loaded) => {
                    // A writer that has ended knows why.
                    if sender.send(loaded).is_err() {
                        break;
                    }
                }
                Err(error) => {
                    read = Err(error);
                    break;
                }
            }
        }
        drop(sender);
        let lost = |_| Err(Error::new(Code::Internal, "the writing thread panicked"));
        writing.join().unwrap_or_else(lost)?;
        read
    })
}

fn write_all(
    source: &Source,
    batches: Receiver<Loaded>,
    sink: &impl Sink,
    progress: &impl Progress,
) -> Result<()> {
    for batch in batches {
        let mut pieces: Vec<(usize, usize)> = Vec::new();
        for (part, (want, _)) in batch.parts.iter().enumerate() {
            let starts = (0..want.bytes as usize).step_by(PIECE_BYTES);
            pieces.extend(starts.map(|start| (part, start)));
        }
        let written = parallel::map(&pieces, |&(part, start)| {
            let bytes = batch.bytes(part);
            let piece = bytes.get(start..bytes.len().min(start + PIECE_BYTES)).unwrap_or_default();
            write_piece(source, &batch, (part, start), piece, sink)?;
            progress.add(piece.len() as u64)
        });
        written.into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}

fn write_piece(
    source: &Source,
    batch: &Loaded,
    (part, start): (usize, usize),
    bytes: &[u8],
    sink: &impl Sink,
) -> Result<()> {
    let lost = || Error::new(Code::Internal, "a piece of a tensor that is not to be written");
    let (want, _) = batch.parts.get(part).ok_or_else(lost)?;
    let from = source.tensors.get(want.tensor).ok_or_else(lost)?.dtype;
    let to = sink.dtype(want.tensor).ok_or_else(lost)?;
    let offset = want.offset + start as u64;
    if from == to {
        return sink.write(want.tensor, offset, bytes);
    }
    let mut out = Vec::new();
    cast(from, to, bytes, &mut out);
    sink.write(want.tensor, offset / from.bits() * to.bits(), &out)
}
