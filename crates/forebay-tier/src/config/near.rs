//! The known word that is nearest to one that is not known.

/// Changes that still count as a slip of the fingers.
const CHANGES_MAX: usize = 3;

/// The nearest of `known`, if it is near enough to be meant.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known.map(|known| (distance(word, known), known));
    let (changes, found) = scored.min()?;
    (changes <= CHANGES_MAX && changes * 2 <= found.len().max(2)).then_some(found)
}

/// Letters to put in, take away, replace, or swap with their neighbour. Words are keys: short; long ones are cut.
fn distance(a: &str, b: &str) -> usize {
    let cut = |word: &str| word.chars().take(64).collect::<Vec<char>>();
    let (a, b) = (cut(a), cut(b));
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, of_a) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, of_b) in b.iter().enumerate() {
            let mut least = (last[j] + usize::from(of_a != of_b)).min(last[j + 1] + 1);
            least = least.min(row[j] + 1);
            if i > 0 && j > 0 && *of_a == b[j - 1] && a[i - 1] == *of_b {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_found_and_none_where_none_is_near() {
        let known = ["capacity", "keep_last", "keep_every", "place"];
        let near = |word| nearest(word, known.iter().copied());
        assert_eq!(near("capcity"), Some("capacity"));
        assert_eq!(near("keep_lats"), Some("keep_last"));
        assert_eq!(near("keeplast"), Some("keep_last"));
        assert_eq!(near("plaec"), Some("place"));
        assert_eq!(near("bandwidth"), None);
        assert_eq!(near(""), None);
        assert_eq!(nearest("x", std::iter::empty()), None);
    }
}
