//! Which ranges share a request.

use std::io;
use std::ops::Range;

/// The widest gap that is read and thrown away: 10 ms of a connection of 25 to 100 MB/s, less than the 20 to 30 ms of a
/// request more.
const GAP_BYTES: u64 = 512 << 10;
/// The most bytes of a request of several ranges: they are kept in memory until all have come.
const GROUP_BYTES: u64 = 4 << 20;

/// Ranges of one request, `(offset, bytes)`, in their order.
pub(super) struct Group<'p, 'b> {
    /// From the first byte of the first to the last of the last.
    pub(super) range: Range<u64>,
    pub(super) parts: &'p mut [(u64, &'b mut [u8])],
}

/// Sorts ranges and groups them. Errors: `UnexpectedEof` for one that is not within `size`.
pub(super) fn groups<'p, 'b>(
    parts: &'p mut [(u64, &'b mut [u8])],
    size: u64,
) -> io::Result<Vec<Group<'p, 'b>>> {
    parts.sort_unstable_by_key(|(offset, _)| *offset);
    let end = |part: &(u64, &mut [u8])| part.0.checked_add(part.1.len() as u64);
    if parts.iter().any(|part| end(part).is_none_or(|end| end > size)) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut groups = Vec::new();
    let mut rest = parts;
    while let Some(first) = rest.first() {
        let start = first.0;
        let (mut last, mut count) = (end(first).unwrap_or(start), 1);
        for part in rest.iter().skip(1) {
            let after = end(part).unwrap_or(u64::MAX).max(last);
            if part.0 > last.saturating_add(GAP_BYTES) || after - start > GROUP_BYTES {
                break;
            }
            (last, count) = (after, count + 1);
        }
        let (group, behind) = rest.split_at_mut(count);
        // A request of nothing is none.
        if last > start {
            groups.push(Group { range: start..last, parts: group });
        }
        rest = behind;
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grouped(ranges: &[(u64, usize)]) -> io::Result<Vec<(Range<u64>, usize)>> {
        let mut memory: Vec<Vec<u8>> = ranges.iter().map(|&(_, len)| vec![0; len]).collect();
        let parts = ranges.iter().zip(&mut memory);
        let mut parts: Vec<_> = parts.map(|(&(at, _), into)| (at, into.as_mut_slice())).collect();
        let groups = groups(&mut parts, 100 << 20)?;
        Ok(groups.into_iter().map(|group| (group.range, group.parts.len())).collect())
    }

    #[test]
    fn near_ranges_share_a_request_and_far_ones_do_not() {
        let far = 10 << 20;
        let found = grouped(&[(far, 7), (0, 10), (GAP_BYTES + 10, 5), (far + 7, 3)]).unwrap();
        assert_eq!(found, [(0..GAP_BYTES + 15, 2), (far..far + 10, 2)]);
        let found = grouped(&[(0, 10), (GAP_BYTES + 11, 5)]).unwrap();
        assert_eq!(found.len(), 2);
        let large = 3 << 20;
        let found = grouped(&[(0, large), (large as u64, large)]).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(grouped(&[(5, 0)]).unwrap().is_empty());
        assert!(grouped(&[(100 << 20, 1)]).is_err());
        assert!(grouped(&[(u64::MAX, 1)]).is_err());
    }
}
