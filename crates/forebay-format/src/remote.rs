//! Files that are not on this machine: objects of a bucket, behind two small traits that who knows stores implements.
//!
//! A [`RemoteFolder`] lists and opens, a [`RemoteObject`] reads ranges of one state of an object. To readers of formats
//! both look like a folder and its files ([`Folder`](crate::Folder), [`OpenFile`](crate::OpenFile)); what they must not
//! do there is ask for a few bytes at a time, because each request is a round trip. So small reads go through
//! `Blocks`: the object's blocks of 64 KiB, each fetched once by whoever comes first, the last few kept. Large reads
//! go straight into the caller's buffer. The engine's reads pass this by altogether.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use forebay_error::{Code, Error, Result};

use crate::torch_zip::buffer;

/// Bytes of a block. An archive's head or directory is a few hundred bytes: one request has it, and the neighbour's;
/// of items of 4 MiB that is 1.6 % more than is needed.
const BLOCK_BYTES: u64 = 64 << 10;
/// Blocks that are kept of one object: 2 MiB; 16 threads at two places each.
const BLOCKS_MAX: usize = 32;
/// Blocks that are kept of all objects: 64 MiB, of which the oldest go first, so that a checkpoint of thousands of
/// files takes no more while it is open.
const ALL_BLOCKS_MAX: usize = 1024;
/// Reads from here on are not taken apart.
const LARGE_BYTES: usize = 128 << 10;

/// An object that was opened for reading: all reads are of the state that it had then, or fail with `file_changed`.
pub trait RemoteObject: Send + Sync {
    /// Its bytes.
    fn size(&self) -> u64;

    /// Reads at `offset`, as much as it likes up to `into.len()`; 0 means the end.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Fills several ranges, which do not overlap: near ones by one request, others at once.
    fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()>;

    /// Fails with `file_changed` where the object is not the one any more that was opened.
    fn check_unchanged(&self) -> Result<()>;
}

/// Objects below a prefix, by names relative to it.
pub trait RemoteFolder: Send + Sync {
    /// The names directly in the folder and whether each is a folder; at most `limit`, else `unsupported`.
    fn names(&self, limit: usize) -> Result<Vec<(String, bool)>>;

    /// Bytes of the objects directly in it, by name.
    fn sizes(&self) -> Result<HashMap<String, u64>>;

    /// Opens an object. `not_found` where there is none.
    fn open(&self, name: &str) -> Result<Arc<dyn RemoteObject>>;

    /// A folder in it, be it there or not.
    fn folder(&self, name: &str) -> Arc<dyn RemoteFolder>;
}

/// A block: locked while it is fetched, so that others who want it wait for that and do not ask again.
type Block = Arc<Mutex<Option<Vec<u8>>>>;

/// The blocks of all objects in the order of their coming, with those that have been let go since.
static ALL: Mutex<VecDeque<(Weak<Mutex<Kept>>, u64)>> = Mutex::new(VecDeque::new());

/// An object whose small reads are shared.
pub(crate) struct Blocks {
    pub(crate) object: Arc<dyn RemoteObject>,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Default)]
struct Kept {
    blocks: HashMap<u64, Block>,
    /// In the order of their coming.
    order: VecDeque<u64>,
}

impl Kept {
    /// A block, and whether it is new.
    fn block(&mut self, number: u64) -> (Block, bool) {
        if let Some(block) = self.blocks.get(&number) {
            return (block.clone(), false);
        }
        if self.order.len() >= BLOCKS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.blocks.remove(&oldest);
        }
        self.order.push_back(number);
        (self.blocks.entry(number).or_default().clone(), true)
    }

    fn forget(&mut self, number: u64) {
        if self.blocks.remove(&number).is_some() {
            self.order.retain(|one| *one != number);
        }
    }
}

impl Blocks {
    pub(crate) fn new(object: Arc<dyn RemoteObject>) -> Self {
        Self { object, kept: Arc::default() }
    }

    fn block(&self, number: u64) -> Block {
        let (block, is_new) = locked(&self.kept).block(number);
        if is_new {
            // One lock at a time.
            let oldest = {
                let mut all = locked(&ALL);
                all.push_back((Arc::downgrade(&self.kept), number));
                if all.len() > ALL_BLOCKS_MAX { all.pop_front() } else { None }
            };
            if let Some((kept, number)) = oldest
                && let Some(kept) = kept.upgrade()
            {
                locked(&kept).forget(number);
            }
        }
        block
    }

    /// Fills a buffer that lies within the object.
    pub(crate) fn read(&self, into: &mut [u8], offset: u64) -> Result<()> {
        if into.len() >= LARGE_BYTES {
            return self.fill(into, offset);
        }
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = offset.saturating_add(done as u64);
            let number = at / BLOCK_BYTES;
            let block = self.block(number);
            let mut bytes = locked(&block);
            let bytes = match &mut *bytes {
                Some(bytes) => bytes,
                empty => empty.insert(self.fetch(number)?),
            };
            let from = usize::try_from(at % BLOCK_BYTES).unwrap_or(usize::MAX);
            let part = bytes.get(from..).unwrap_or_default();
            let count = part.len().min(rest.len());
            match (rest.get_mut(..count), part.get(..count)) {
                (Some(rest), Some(part)) if count > 0 => rest.copy_from_slice(part),
                _ => return Err(Error::new(Code::Internal, "a read past the end of an object")),
            }
            done += count;
        }
        Ok(())
    }

    fn fetch(&self, number: u64) -> Result<Vec<u8>> {
        let start = number * BLOCK_BYTES;
        let mut bytes = buffer(self.object.size().saturating_sub(start).min(BLOCK_BYTES))?;
        self.fill(&mut bytes, start)?;
        Ok(bytes)
    }

    fn fill(&self, into: &mut [u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = offset.saturating_add(done as u64);
            match self.object.read_at(rest, at) {
                Ok(0) => {
                    let what = format!("object changed while it was in use: it ends at byte {at}");
                    return Err(Error::new(Code::FileChanged, what));
                }
                Ok(count) => done += count.min(rest.len()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let what = format!("cannot read {} bytes at byte {at}", rest.len());
                    return Err(Error::io(what, error));
                }
            }
        }
        Ok(())
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// An object that counts how often it is asked.
    struct Counted(Vec<u8>, AtomicUsize);

    impl RemoteObject for Counted {
        fn size(&self) -> u64 {
            self.0.len() as u64
        }

        fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
            self.1.fetch_add(1, Ordering::Relaxed);
            let rest = &self.0[offset as usize..];
            let count = rest.len().min(into.len());
            into[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        }

        fn read_many(&self, _parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
            unreachable!("not asked for here")
        }

        fn check_unchanged(&self) -> Result<()> {
            Ok(())
        }
    }

    fn object(len: usize) -> Arc<Counted> {
        let bytes = (0..len).map(|at| ((at * 7) >> 3) as u8).collect();
        Arc::new(Counted(bytes, AtomicUsize::new(0)))
    }

    #[test]
    fn small_reads_ask_once_a_block_whoever_comes() {
        let object = object(200_001);
        let blocks = Blocks::new(object.clone());
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let (blocks, object) = (&blocks, &object);
                scope.spawn(move || {
                    for step in 0..500 {
                        let offset = (step * 397 + thread) % 199_000;
                        let mut into = vec![0; 1 + (step as usize * 13) % 900];
                        blocks.read(&mut into, offset).unwrap();
                        assert!(into == object.0[offset as usize..][..into.len()]);
                    }
                });
            }
        });
        assert_eq!(object.1.load(Ordering::Relaxed), 4);
        let mut last = [0; 1];
        blocks.read(&mut last, 200_000).unwrap();
        assert!(blocks.read(&mut [0; 2], 200_000).is_err());
    }

    #[test]
    fn large_reads_are_one_request_and_few_blocks_are_kept() {
        let object = object(8 << 20);
        let blocks = Blocks::new(object.clone());
        let mut large = vec![0; 3 << 20];
        blocks.read(&mut large, 5).unwrap();
        assert!(large == object.0[5..][..large.len()]);
        assert_eq!(object.1.load(Ordering::Relaxed), 1);
        for number in 0..128 {
            blocks.read(&mut [0; 8], number * BLOCK_BYTES).unwrap();
        }
        let kept = blocks.kept.lock().unwrap();
        assert!((1..=BLOCKS_MAX).contains(&kept.blocks.len()));
        assert_eq!(kept.blocks.len(), kept.order.len());
    }

    #[test]
    fn of_all_objects_that_are_open_so_many_blocks_are_kept() {
        let object = object(4 * BLOCK_BYTES as usize);
        let files: Vec<Blocks> = (0..600).map(|_| Blocks::new(object.clone())).collect();
        for file in &files {
            for number in 0..4 {
                file.read(&mut [0; 8], number * BLOCK_BYTES).unwrap();
            }
        }
        let kept = |file: &Blocks| file.kept.lock().unwrap().blocks.len();
        assert!(files.iter().map(kept).sum::<usize>() <= ALL_BLOCKS_MAX);
        assert_eq!(kept(&files[0]), 0, "the oldest");
        let before = object.1.load(Ordering::Relaxed);
        files[0].read(&mut [0; 8], 0).unwrap();
        assert_eq!(object.1.load(Ordering::Relaxed), before + 1);
    }
}
