//! HTTP: the page, the API and the metrics, on hyper with bounds on everything a stranger can make it wait for or keep.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`access`] | who may read, who may act |
//! | [`route`] | from a request to an answer |
//! | [`copies`] | what other agents ask |
//! | [`act`] | actions, of the API and of forms |
//! | [`pool`] | threads for them, bounded |
//! | [`peers`] | connections by address, bounded |
//! | [`renew`] | tokens and certificates that are replaced |
//! | [`form`] | what forms of the page may ask for |
//! | [`body`] | bodies of requests, bounded |
//! | [`answer`] | answers with the headers that all have |
//!
//! A connection costs a task and at most 32 KiB of head and 64 KiB of body; there are at most [`CONNECTIONS_MAX`], and
//! one that is slow with its handshake, its head or its body, or with taking an answer, is closed. What may block
//! (files and networks of the tiers) runs on a few threads of the runtime's own pool, and actions, which may take
//! hours, on those of [`pool`]. A copy that comes has bounds of its own ([`copies`]). No header allows other sites
//! anything.

mod access;
mod act;
mod answer;
mod body;
mod copies;
mod form;
mod peers;
mod pool;
mod renew;
mod route;

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_error::{Error, Result};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::accept::accept;
use crate::copies::Copies;
use crate::job::Jobs;
use crate::metrics::Counts;
use crate::session::Sessions;
use crate::settings::Checked;
use access::Access;
use peers::Peers;
use pool::Pool;
use renew::Tls;
pub(crate) use renew::{Files, Stamp, stamp};

/// Connections at a time; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 128;
/// Of those, the ones of one address; more are closed.
const OF_ADDRESS_MAX: usize = 64;
/// For the handshake of TLS.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// For the head of a request, from the first byte or the end of the answer before.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a connection lives, whatever it does: who reads an answer a byte at a time holds it no longer. Clients
/// connect again.
const CONNECTION_TIME: Duration = Duration::from_secs(60);
/// Bytes of a head; hyper asks for at least 8 KiB.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Lines of a head.
const HEADERS_MAX: usize = 64;
/// What all requests share.
pub(crate) struct Site {
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) counts: Arc<Counts>,
    access: Access,
    sessions: Sessions,
    pool: Pool,
    copies: Arc<Copies>,
    /// Places for files that come.
    taking: Arc<Semaphore>,
}

/// A listener that is bound; [`serve`](Self::serve) answers.
pub(crate) struct Http {
    listener: std::net::TcpListener,
    tls: Option<Arc<Tls>>,
    site: Arc<Site>,
    files: Files,
}

impl Http {
    /// Binds. `checked` is what was in the files after `files` were noted. Errors: `io` with the address, where it is
    /// in use or not this machine's.
    pub(crate) fn bind(
        checked: Checked,
        files: Files,
        jobs: Arc<Jobs>,
        counts: Arc<Counts>,
        copies: Arc<Copies>,
    ) -> Result<Self> {
        let failed = |error| Error::io("cannot listen", error).at(checked.listen);
        let listener = std::net::TcpListener::bind(checked.listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let access = Access::new(checked.read, checked.act, checked.tls.is_some());
        access.set_peer(checked.peer);
        let (sessions, pool) = (Sessions::default(), Pool::default());
        let taking = Arc::new(Semaphore::new(copies::TAKEN_AT_ONCE));
        let site = Arc::new(Site { jobs, counts, access, sessions, pool, copies, taking });
        Ok(Self { listener, tls: checked.tls.map(|tls| Arc::new(Tls::new(tls))), site, files })
    }

    /// Where it listens: the port that the system chose for port 0.
    pub(crate) fn address(&self) -> Result<std::net::SocketAddr> {
        self.listener.local_addr().map_err(|error| Error::io("cannot ask for the address", error))
    }

    /// Answers until `end` changes. Runs on a tokio runtime.
    pub(crate) async fn serve(self, end: watch::Receiver<bool>) -> Result<()> {
        let listener = TcpListener::from_std(self.listener)
            .map_err(|error| Error::io("cannot listen", error))?;
        let (site, tls) = (self.site, self.tls);
        tokio::spawn(renew::watch(self.files, Arc::clone(&site), tls.clone(), end.clone()));
        let peers = Arc::new(Peers::default());
        let start = |stream: TcpStream, place| {
            // Who is gone already needs no answer.
            let Ok(peer) = stream.peer_addr() else { return Ok(()) };
            let peer = peer.ip().to_canonical();
            let Some(seat) = peers.enter(peer, OF_ADDRESS_MAX) else {
                site.counts.denied();
                return Ok(());
            };
            let (site, end) = (Arc::clone(&site), end.clone());
            let tls = tls.as_ref().map(|tls| tls.acceptor());
            tokio::spawn(async move {
                let _places = (place, seat);
                site.counts.http_connections.fetch_add(1, Ordering::Relaxed);
                let busy = AtomicBool::new(false);
                let mut talk = std::pin::pin!(connection(&site, tls, stream, peer, end, &busy));
                // Who sends a file has the time that it takes, as long as it comes.
                while timeout(CONNECTION_TIME, talk.as_mut()).await.is_err()
                    && busy.load(Ordering::Relaxed)
                {}
                site.counts.http_connections.fetch_sub(1, Ordering::Relaxed);
            });
            Ok(())
        };
        accept(&listener, CONNECTIONS_MAX, end.clone(), start).await;
        Ok(())
    }
}

async fn connection(
    site: &Arc<Site>,
    tls: Option<TlsAcceptor>,
    stream: TcpStream,
    peer: IpAddr,
    end: watch::Receiver<bool>,
    busy: &AtomicBool,
) {
    let _ = stream.set_nodelay(true);
    let Some(tls) = tls else { return talk(site, stream, peer, end, busy).await };
    match timeout(HANDSHAKE_TIME, tls.accept(stream)).await {
        Ok(Ok(stream)) => talk(site, stream, peer, end, busy).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS"),
        Err(_) => tracing::debug!("no TLS in time"),
    }
}

async fn talk<S>(
    site: &Arc<Site>,
    stream: S,
    peer: IpAddr,
    mut end: watch::Receiver<bool>,
    busy: &AtomicBool,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let service = service_fn(|request| {
        let site = Arc::clone(site);
        async move { Ok::<_, Infallible>(route::answer(&site, peer, busy, request).await) }
    });
    let talk = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut talk = std::pin::pin!(talk);
    let ended = tokio::select! {
        ended = talk.as_mut() => ended,
        _ = end.changed() => {
            // The answer under way is finished, and no further request is read.
            talk.as_mut().graceful_shutdown();
            talk.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}
