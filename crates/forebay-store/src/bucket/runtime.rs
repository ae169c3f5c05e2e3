//! One runtime for all stores of a process, and blocking calls into it.
//!
//! Requests are futures on a tokio runtime of two threads, which move bytes between sockets and buffers; parsing and
//! checksums of what a caller waits for run on the caller's own thread, because [`wait`] polls there. So the futures
//! may borrow from the caller, and bytes that arrive are copied straight to where they belong.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use forebay_error::{Error, Result};
use tokio::runtime::{Builder, Handle};

/// Threads that drive sockets: one saturates 10 Gbit/s without TLS; two leave room for it.
const THREADS: usize = 2;

/// With the process that its threads are of.
static RUNTIME: Mutex<Option<(u32, Handle)>> = Mutex::new(None);

/// The runtime. Errors: `io`, `out_of_memory` where no thread is to be had.
pub(super) fn handle() -> Result<Handle> {
    let locked = || RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let own = std::process::id();
    // A child of a fork has none of its parent's threads, and starts its own.
    let started = |runtime: &Option<(u32, Handle)>| {
        let own = runtime.as_ref().filter(|(process, _)| *process == own);
        own.map(|(_, handle)| handle.clone())
    };
    if let Some(handle) = started(&locked()) {
        return Ok(handle);
    }
    // Its own cryptography for TLS, unless the process has chosen one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let built = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("forebay-net")
        .enable_all()
        .build()
        .map_err(|error| Error::io("cannot start threads for the network", error))?;
    // Not held while threads start: in a child that is forked meanwhile nobody would ever release it.
    let mut runtime = locked();
    if let Some(handle) = started(&runtime) {
        drop(runtime);
        built.shutdown_background();
        return Ok(handle);
    }
    let handle = built.handle().clone();
    *runtime = Some((own, handle.clone()));
    // It ends with the process.
    std::mem::forget(built);
    Ok(handle)
}

/// Runs a future to its end on this thread, with the runtime's sockets and timers. May be called from anywhere, also
/// from a thread that belongs to another runtime.
pub(super) fn wait<T>(handle: &Handle, future: impl Future<Output = T>) -> T {
    let _inside = handle.enter();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn futures_borrow_from_who_waits_and_timers_run() {
        let handle = handle().unwrap();
        let mut bytes = [0; 4];
        wait(&handle, async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            bytes[0] = 7;
        });
        assert_eq!(bytes[0], 7);
        let inner = handle.clone();
        let nested = wait(&handle, async move {
            tokio::spawn(async move { wait(&inner, async { 3 }) }).await.unwrap()
        });
        assert_eq!(nested, 3);
    }
}
