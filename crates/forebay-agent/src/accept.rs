//! Taking connections, the same for HTTP and for the socket: as many at a time as there are places, until the end.

use std::io;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// After an error (out of descriptors), so that it does not spin.
const PAUSE: Duration = Duration::from_millis(100);

/// What connections come from.
pub(crate) trait Listener: Sync {
    /// A connection.
    type Stream: Send;

    /// The next one.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<UnixStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

/// Gives each connection to `start`, with the place that it holds until it drops it; more wait in the kernel's queue.
/// Returns when `end` changes.
pub(crate) async fn accept<L: Listener>(
    listener: &L,
    places: usize,
    mut end: watch::Receiver<bool>,
    start: impl Fn(L::Stream, Option<OwnedSemaphorePermit>) -> io::Result<()>,
) {
    let places = std::sync::Arc::new(Semaphore::new(places));
    loop {
        let accepted = async {
            // Nobody closes it.
            let place = std::sync::Arc::clone(&places).acquire_owned().await.ok();
            (place, listener.next().await)
        };
        let (place, stream) = tokio::select! {
            accepted = accepted => accepted,
            _ = end.changed() => return,
        };
        if let Err(error) = stream.and_then(|stream| start(stream, place)) {
            tracing::debug!(%error, "no connection");
            tokio::time::sleep(PAUSE).await;
        }
    }
}
