//! Whether boxes cover a tensor once: their volumes add up to the tensor's, and no two of them meet.

use super::cursor::Check;
use super::cuts::Cut;

/// Pairs of boxes that are compared at the most: a minute's work.
const MOST_PAIRS: u64 = 1 << 32;

/// `boxes` with elements lie inside of `shape`.
pub(super) fn check(shape: &[u64], boxes: &[&Cut]) -> Check<()> {
    let volume = |sizes: &[u64]| {
        sizes.iter().try_fold(1u128, |volume, &size| volume.checked_mul(size.into()))
    };
    let mut sum = 0u128;
    for (offsets, sizes) in boxes.iter().copied() {
        let inside = offsets.len() == shape.len()
            && sizes.len() == shape.len()
            && offsets.iter().zip(sizes).zip(shape).all(|((&offset, &size), &side)| {
                offset.checked_add(size).is_some_and(|end| end <= side)
            });
        if !inside {
            return Err(format!("a piece at {offsets:?} of {sizes:?} leaves {shape:?}"));
        }
        sum = sum.saturating_add(volume(sizes).unwrap_or(u128::MAX));
    }
    disjoint(shape.len(), boxes)?;
    let total = volume(shape).ok_or("a tensor of more than 2^128 elements")?;
    match sum == total {
        true => Ok(()),
        false => Err(format!("pieces of {sum} elements for {total}")),
    }
}

/// Sweeps along the dimension with the most different starts, and compares each box with those that have not ended.
fn disjoint(dims: usize, boxes: &[&Cut]) -> Check<()> {
    let starts = |dim: &usize| {
        let mut starts: Vec<_> = boxes.iter().map(|cut| cut.0.get(*dim)).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(dim) = (0..dims).max_by_key(starts) else {
        return if boxes.len() > 1 { Err("two pieces of one element".into()) } else { Ok(()) };
    };
    let span = |cut: &Cut, dim: usize| {
        let start = cut.0.get(dim).copied().unwrap_or_default();
        (start, start.saturating_add(cut.1.get(dim).copied().unwrap_or_default()))
    };
    let mut order: Vec<&Cut> = boxes.to_vec();
    order.sort_by_key(|cut| span(cut, dim));
    let mut open: Vec<&Cut> = Vec::new();
    let mut pairs = 0u64;
    for cut in order {
        let start = span(cut, dim).0;
        open.retain(|other| span(other, dim).1 > start);
        pairs += open.len() as u64;
        if pairs > MOST_PAIRS {
            return Err("more pieces side by side than an audit compares".into());
        }
        let meets = |other: &&&Cut| {
            (0..dims).all(|dim| {
                let (a, b) = (span(other, dim), span(cut, dim));
                a.0 < b.1 && b.0 < a.1
            })
        };
        if let Some(other) = open.iter().find(meets) {
            return Err(format!("pieces at {:?} and {:?} meet", other.0, cut.0));
        }
        open.push(cut);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn holes_overlaps_and_what_is_right() {
        let cut = |offset: [u64; 2], size: [u64; 2]| (offset.to_vec(), size.to_vec());
        let right = [cut([0, 0], [2, 3]), cut([2, 0], [2, 1]), cut([2, 1], [2, 2])];
        let all: Vec<_> = right.iter().collect();
        assert_eq!(check(&[4, 3], &all), Ok(()));
        assert!(check(&[4, 4], &all).unwrap_err().contains("elements"));
        assert!(check(&[4, 2], &all).unwrap_err().contains("leaves"));
        let double = cut([1, 2], [2, 1]);
        assert!(check(&[4, 3], &[all.clone(), vec![&double]].concat()).is_err());
        assert!(check(&[4, 3], &all[..2]).is_err());
        let point = (Vec::new(), Vec::new());
        assert_eq!(check(&[], &[&point]), Ok(()));
        assert!(check(&[], &[&point, &point]).is_err());
        assert!(check(&[], &[]).is_err());
    }
}
