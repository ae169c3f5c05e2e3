//! One function over many items, on threads, items in order of their place.

use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_error::{Code, Error, Result};

use crate::interrupt;

/// What `work` says about each item, in order. Ends early with the first error, or when a signal asks for the end.
/// The calling thread works too, so that a machine out of threads is slow and not stuck.
pub(crate) fn map<T, R>(
    items: &[T],
    threads: usize,
    work: impl Fn(usize, &T) -> Result<R> + Sync,
) -> Result<Vec<R>>
where
    T: Sync,
    R: Send,
{
    let next = AtomicUsize::new(0);
    let worker = || -> Result<Vec<(usize, R)>> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return Ok(done) };
            let result = interrupt::check().and_then(|()| work(index, item));
            if result.is_err() {
                // The others find nothing more to do.
                next.store(items.len(), Ordering::Relaxed);
            }
            done.push((index, result?));
        }
    };
    let parts = std::thread::scope(|scope| {
        let helpers = threads.min(items.len()).saturating_sub(1);
        let spawn = |_| {
            let builder = std::thread::Builder::new().name("forebay-work".to_owned());
            builder.spawn_scoped(scope, worker)
        };
        let helpers: Vec<_> = (0..helpers).map_while(|index| spawn(index).ok()).collect();
        let mut parts = vec![worker()];
        let lost = |_| Err(Error::new(Code::Internal, "a worker thread panicked"));
        parts.extend(helpers.into_iter().map(|helper| helper.join().unwrap_or_else(lost)));
        parts
    });
    let mut done = Vec::with_capacity(items.len());
    for part in parts {
        done.extend(part?);
    }
    done.sort_by_key(|(index, _)| *index);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_order_and_errors_end_it() {
        let items: Vec<u32> = (0..1000).collect();
        let doubled = map(&items, 4, |_, item| Ok(item * 2)).unwrap();
        assert_eq!(doubled, items.iter().map(|item| item * 2).collect::<Vec<_>>());
        let failed = map(&items, 4, |index, _| match index {
            7 => Err(Error::new(Code::Io, "seven")),
            _ => Ok(()),
        });
        assert_eq!(failed.unwrap_err().what(), "seven");
        assert!(map(&[] as &[u8], 4, |_, _| Ok(())).unwrap().is_empty());
    }
}
