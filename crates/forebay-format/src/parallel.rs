//! One function over many items, on a few threads. Headers lie on network file systems, where each costs a round trip.

use forebay_error::{Code, Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// More threads than this do not open files faster on any file system measured.
const THREADS: usize = 16;

/// What `work` says about each item, in order. The calling thread works too, so that a machine out of threads is slow
/// and not stuck.
pub fn map<T, R>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Vec<Result<R>>
where
    T: Sync,
    R: Send,
{
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            match items.get(index) {
                Some(item) => done.push((index, work(item))),
                None => return done,
            }
        }
    };
    let mut done = thread::scope(|scope| {
        let helpers = THREADS.min(items.len()).saturating_sub(1);
        let spawn =
            |_| thread::Builder::new().name("forebay-files".to_owned()).spawn_scoped(scope, worker);
        let helpers: Vec<_> = (0..helpers).map_while(|index| spawn(index).ok()).collect();
        let mut done = worker();
        for helper in helpers {
            done.extend(helper.join().unwrap_or_default());
        }
        done
    });
    done.sort_by_key(|(index, _)| *index);
    let mut done = done.into_iter().peekable();
    let lost = || Err(Error::new(Code::Internal, "a thread that opens files died"));
    let result =
        |index| done.next_if(|(at, _)| *at == index).map_or_else(lost, |(_, result)| result);
    (0..items.len()).map(result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_their_order() {
        let items: Vec<u32> = (0..1000).collect();
        let results = map(&items, |&item| match item {
            7 => Err(Error::new(Code::Usage, "seven")),
            _ => Ok(item * 2),
        });
        assert_eq!(results.len(), 1000);
        for (index, result) in results.into_iter().enumerate() {
            assert_eq!(result.ok(), (index != 7).then_some(index as u32 * 2));
        }
        assert!(map(&[] as &[u32], |_| Ok(())).is_empty());
    }
}
