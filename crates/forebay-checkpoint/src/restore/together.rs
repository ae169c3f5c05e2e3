//! Reading of many small items that lie side by side: each file opened once, neighbours in one read.
//!
//! Files are gone through one after the other, so that no more than one is open here however many there are.

use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_format::torch_zip::ReadAt;

use super::buffer;

/// The most bytes of one read, unless one item has more.
const READ_BYTES: u64 = 1 << 20;

/// Bytes between two items that are read along rather than left out by a second read: a page.
const GAP_BYTES: u64 = 4096;

/// Where an item lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Which of those that were asked for.
    pub(super) number: usize,
    /// The file's number.
    pub(super) file: u32,
    /// First byte.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) length: u64,
}

impl Place {
    fn end(&self) -> Result<u64> {
        self.offset.checked_add(self.length).ok_or_else(|| {
            let what = format!("an item of {} bytes from byte {} on", self.length, self.offset);
            Error::new(Code::OutOfBounds, what)
        })
    }
}

/// Calls `each` with every place, its file and its bytes, by file and offset. Where a read fails, what it was to bring
/// is read one by one, and `each` hears which of it is at fault.
///
/// Errors: those of `open` and of `each`.
pub(super) fn read_together<F: ReadAt>(
    mut places: Vec<Place>,
    mut open: impl FnMut(u32) -> Result<Arc<F>>,
    mut each: impl FnMut(&Place, &F, Result<&[u8]>) -> Result<()>,
) -> Result<()> {
    places.sort_by_key(|place| (place.file, place.offset, place.length));
    for of_file in places.chunk_by(|a, b| a.file == b.file) {
        let Some(first) = of_file.first() else { continue };
        let file = open(first.file)?;
        let mut rest = of_file;
        while let Some(first) = rest.first() {
            let (count, end) = neighbours(rest)?;
            let (now, later) = rest.split_at(count);
            let mut bytes = buffer(end - first.offset)?;
            let read = file.read_exact_at(&mut bytes, first.offset);
            for place in now {
                if read.is_err() {
                    let mut own = buffer(place.length)?;
                    let read = file.read_exact_at(&mut own, place.offset);
                    each(place, &file, read.map(|()| own.as_slice()))?;
                    continue;
                }
                let start = (place.offset - first.offset) as usize;
                let item =
                    start.checked_add(place.length as usize).and_then(|e| bytes.get(start..e));
                let item =
                    item.ok_or_else(|| Error::new(Code::Internal, "an item was not read"))?;
                each(place, &file, Ok(item))?;
            }
            rest = later;
        }
    }
    Ok(())
}

/// How many of these places, sorted by offset, are read at once, and where the last of them ends.
fn neighbours(places: &[Place]) -> Result<(usize, u64)> {
    let (mut count, mut end, mut start) = (0, 0, 0);
    for place in places {
        let own = place.end()?.max(end);
        if count == 0 {
            start = place.offset;
        } else if place.offset > end.saturating_add(GAP_BYTES) || own - start > READ_BYTES {
            break;
        }
        (count, end) = (count + 1, own);
    }
    Ok((count, end))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use forebay_format::OpenFile;

    use super::*;

    /// A file that counts its reads.
    struct Counted<'c>(OpenFile, &'c AtomicUsize);

    impl ReadAt for Counted<'_> {
        fn name(&self) -> String {
            ReadAt::name(&self.0)
        }

        fn size(&self) -> u64 {
            self.0.size()
        }

        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.read_exact_at(buffer, offset)
        }
    }

    /// Reads places of `files` files of 4 MiB; opens, reads, and what came.
    fn read(files: u32, places: &[Place]) -> (usize, usize, Vec<usize>) {
        let folder = tempfile::tempdir().unwrap();
        let byte = |file: u32, at: usize| (at * 7 + (at >> 8) + file as usize) as u8;
        for file in 0..files {
            let bytes: Vec<u8> = (0..4 << 20).map(|at| byte(file, at)).collect();
            std::fs::write(folder.path().join(file.to_string()), bytes).unwrap();
        }
        let (mut opens, reads, mut came) = (0, AtomicUsize::new(0), Vec::new());
        let open = |file: u32| {
            opens += 1;
            let open = OpenFile::open(&folder.path().join(file.to_string()))?;
            Ok(Arc::new(Counted(open, &reads)))
        };
        let each = |place: &Place, _: &Counted<'_>, bytes: Result<&[u8]>| {
            let bytes = bytes?;
            assert_eq!(bytes.len() as u64, place.length);
            let start = place.offset as usize;
            let right = bytes.iter().zip(start..).all(|(&one, at)| one == byte(place.file, at));
            assert!(right, "{place:?}");
            came.push(place.number);
            Ok(())
        };
        read_together(places.to_vec(), open, each).unwrap();
        came.sort_unstable();
        (opens, reads.into_inner(), came)
    }

    #[test]
    fn each_file_is_opened_once_and_neighbours_are_one_read() {
        // In turn from two files, and not in the order that they lie in.
        let places: Vec<Place> = (0..4000)
            .map(|number| Place {
                number,
                file: (number % 2) as u32,
                offset: (3999 - number) as u64 * 200,
                length: 190,
            })
            .collect();
        let (opens, reads, came) = read(2, &places);
        assert_eq!((opens, reads), (2, 2));
        assert_eq!(came, (0..4000).collect::<Vec<_>>());
    }

    #[test]
    fn reads_are_bounded_and_wide_gaps_are_left_out() {
        let place = |number, offset, length| Place { number, file: 0, offset, length };
        // The same twice, one inside of another, one far behind, one longer than a read.
        let places = [
            place(0, 10, 50),
            place(1, 10, 50),
            place(2, 20, 5),
            place(3, 60 + GAP_BYTES + 1, 9),
            place(4, 1 << 20, READ_BYTES + 1),
            place(5, (2 << 20) + 1, 7),
            place(6, 3 << 20, 0),
        ];
        assert_eq!(read(1, &places), (1, 5, (0..7).collect()));
        // 4 MiB of neighbours: as many reads as that has.
        let all: Vec<Place> = (0..1024).map(|n| place(n, n as u64 * 4096, 4000)).collect();
        assert_eq!(read(1, &all).1, 4);
    }

    #[test]
    fn places_that_cannot_be_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, [0; 10]).unwrap();
        let code = |offset, length| {
            let places = vec![Place { number: 0, file: 0, offset, length }];
            let open = |_| Ok(Arc::new(OpenFile::open(&path)?));
            read_together(places, open, |_, _, bytes| bytes.map(drop)).unwrap_err().code()
        };
        assert_eq!(code(5, 6), Code::Truncated);
        assert_eq!(code(u64::MAX, 2), Code::OutOfBounds);
        assert_eq!(code(0, u64::MAX), Code::Unsupported);
    }

    #[test]
    fn an_item_that_a_file_is_too_short_for_does_not_take_its_neighbours_along() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, [0; 100]).unwrap();
        let place = |number, offset, length| Place { number, file: 0, offset, length };
        let places = vec![place(0, 0, 40), place(1, 40, 60), place(2, 90, 11), place(3, 100, 1)];
        let mut ends = Vec::new();
        let each = |place: &Place, _: &OpenFile, bytes: Result<&[u8]>| {
            ends.push((place.number, bytes.map(<[u8]>::len).map_err(|error| error.code())));
            Ok(())
        };
        read_together(places, |_| Ok(Arc::new(OpenFile::open(&path)?)), each).unwrap();
        let short = Err(Code::Truncated);
        assert_eq!(ends, [(0, Ok(40)), (1, Ok(60)), (2, short), (3, short)]);
    }
}
