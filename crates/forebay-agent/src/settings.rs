//! What an agent is told: where to listen, and with which credentials. Checked as a whole before anything starts.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use rustls::ServerConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::copies::{CopySettings, PeerSettings};
use crate::secret::{PEER_TOKEN, Secret, read_private, read_public};

/// As configured.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Unix socket for local processes.
    pub(crate) socket: Option<PathBuf>,
    /// Users besides this one and root who may use the socket, by number.
    pub(crate) socket_users: Vec<u32>,
    /// Address for HTTP.
    pub(crate) listen: Option<SocketAddr>,
    /// File with the token for reading; needed wherever the address is not loopback.
    pub(crate) token_file: Option<PathBuf>,
    /// File with the token for actions; without it there are none by HTTP.
    pub(crate) action_token_file: Option<PathBuf>,
    /// PEM: the certificate and those between it and the root.
    pub(crate) tls_certificate: Option<PathBuf>,
    /// PEM: its private key.
    pub(crate) tls_key: Option<PathBuf>,
    /// Copies on other nodes.
    pub(crate) copies: CopySettings,
}

/// What holds for an HTTP listener.
pub(crate) struct Checked {
    pub(crate) listen: SocketAddr,
    pub(crate) read: Option<Secret>,
    pub(crate) act: Option<Secret>,
    /// Other agents'.
    pub(crate) peer: Option<Secret>,
    pub(crate) tls: Option<Arc<ServerConfig>>,
}

impl Settings {
    /// Reads tokens and certificates, and refuses what would be open to people it should not be open to. `None` where
    /// there is no HTTP.
    ///
    /// Errors: `usage` for an address beyond this machine without TLS or token, half a pair of certificate and key, a
    /// token for both uses; those of files.
    pub(crate) fn check_http(&self) -> Result<Option<Checked>> {
        self.check_copies()?;
        let Some(listen) = self.listen else { return Ok(None) };
        let read = |path: &Option<PathBuf>, what| {
            path.as_deref().map(|path| Secret::read(path, what)).transpose()
        };
        let (reading, acting) = (
            read(&self.token_file, "the token (agent.token_file)")?,
            read(&self.action_token_file, "the token for actions (agent.action_token_file)")?,
        );
        let peer_file = self.copies.peer.as_ref().map(|peer| peer.token_file.clone());
        let peer = read(&peer_file, PEER_TOKEN)?;
        let tls = self.tls()?;
        if !is_loopback(listen.ip()) {
            let missing = match (&tls, &reading) {
                (None, _) => Some("TLS: set agent.tls_certificate and agent.tls_key"),
                (_, None) => Some("a token: set agent.token_file"),
                _ => None,
            };
            if let Some(missing) = missing {
                let what =
                    format!("{listen} can be reached from other machines and needs {missing}");
                let hint = "or listen on 127.0.0.1 and reach it through a tunnel";
                return Err(Error::new(Code::Usage, what).at("agent.listen").hint(hint));
            }
        }
        check_tokens(reading.as_ref(), acting.as_ref(), peer.as_ref())?;
        Ok(Some(Checked { listen, read: reading, act: acting, peer, tls }))
    }

    /// Copies come and go by HTTP. Errors: `usage` where something is missing for that; those of the file of
    /// certificates.
    fn check_copies(&self) -> Result<()> {
        let missing = match (&self.copies.peer, self.listen) {
            (None, _) if self.copies.copies > 0 => "agent.peer_token_file, the same on all nodes",
            (Some(_), None) => "agent.listen, where other agents reach this one",
            _ => "",
        };
        if !missing.is_empty() {
            return Err(Error::new(Code::Usage, format!("copies on other nodes need {missing}")));
        }
        self.copies.peer.as_ref().map_or(Ok(()), PeerSettings::check)
    }

    fn tls(&self) -> Result<Option<Arc<ServerConfig>>> {
        let (certificate, key) = match (&self.tls_certificate, &self.tls_key) {
            (None, None) => return Ok(None),
            (Some(certificate), Some(key)) => (certificate, key),
            _ => {
                let what =
                    "agent.tls_certificate and agent.tls_key belong together: one is missing";
                return Err(Error::new(Code::Usage, what));
            }
        };
        let text = read_public(certificate, "the certificate (agent.tls_certificate)")?;
        let unusable = |what: &str, path: &PathBuf, error: &dyn std::fmt::Display| {
            Error::new(Code::Usage, format!("{what}: {error}")).at(path.display())
        };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&text)
            .collect::<Result<_, _>>()
            .map_err(|error| unusable("no certificate in PEM", certificate, &error))?;
        let secret = read_private(key, "the key (agent.tls_key)")?;
        // What the parser says of a key might quote it.
        let secret = PrivateKeyDer::from_pem_slice(&secret)
            .map_err(|_| unusable("no private key in PEM", key, &"PKCS #8, PKCS #1 or SEC1"))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map(|config| config.with_no_client_auth())
            .and_then(|config| config.with_single_cert(chain, secret));
        let mut config = config
            .map_err(|error| unusable("certificate and key do not work", certificate, &error))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Some(Arc::new(config)))
    }
}

/// Each opens what the others must not. Errors: `usage` for two that are the same.
fn check_tokens(
    reading: Option<&Secret>,
    acting: Option<&Secret>,
    peer: Option<&Secret>,
) -> Result<()> {
    let same = |one: Option<&Secret>, two: Option<&Secret>| {
        one.zip(two).is_some_and(|(one, two)| one.same(two))
    };
    if same(reading, acting) {
        let what = "the tokens for reading and for actions are the same";
        let hint = "whoever may look could then remove; give actions a token of their own";
        return Err(Error::new(Code::Usage, what).at("agent.action_token_file").hint(hint));
    }
    if same(reading, peer) || same(acting, peer) {
        let what = "the token of agents and another one are the same";
        let hint = "give agents a token of their own: it is on every node";
        return Err(Error::new(Code::Usage, what).at("agent.peer_token_file").hint(hint));
    }
    Ok(())
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    fn private(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    #[test]
    fn beyond_this_machine_only_with_tls_and_a_token() {
        let folder = tempfile::tempdir().unwrap();
        let token = private(folder.path(), "token", "0123456789abcdef0123456789abcdef");
        let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let certificate = private(folder.path(), "cert.pem", &pair.cert.pem());
        let key = private(folder.path(), "key.pem", &pair.signing_key.serialize_pem());
        let at = |listen: &str| Settings {
            listen: Some(listen.parse().unwrap()),
            ..Settings::default()
        };
        for open in ["0.0.0.0:1", "[::]:1", "10.1.2.3:1", "[::ffff:10.0.0.1]:1"] {
            let refused = at(open).check_http().err().unwrap();
            assert_eq!(refused.code(), Code::Usage, "{open}");
            assert!(refused.render().contains("TLS"), "{refused}");
            let only_token = Settings { token_file: Some(token.clone()), ..at(open) };
            assert!(only_token.check_http().is_err(), "{open}");
            let only_tls = Settings {
                tls_certificate: Some(certificate.clone()),
                tls_key: Some(key.clone()),
                ..at(open)
            };
            assert!(only_tls.check_http().err().unwrap().render().contains("a token"), "{open}");
            let both = Settings { token_file: Some(token.clone()), ..only_tls };
            assert!(both.check_http().unwrap().unwrap().tls.is_some());
        }
        for near in ["127.0.0.1:1", "127.3.2.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            at(near).check_http().unwrap().unwrap();
        }
        assert!(Settings::default().check_http().unwrap().is_none());
    }

    #[test]
    fn copies_need_a_token_of_their_own_and_a_door() {
        let folder = tempfile::tempdir().unwrap();
        let token = private(folder.path(), "token", "0123456789abcdef0123456789abcdef");
        let peer_token = private(folder.path(), "peer", "0123456789abcdef-of-agents");
        let listen = Some("127.0.0.1:1".parse().unwrap());
        let peer = |token_file: &PathBuf, url: Option<&str>| PeerSettings {
            token_file: token_file.clone(),
            url: url.map(str::to_owned),
            ca_file: None,
        };
        let of = |listen, copies, peer| Settings {
            listen,
            token_file: Some(token.clone()),
            copies: CopySettings { copies, peer, ..CopySettings::default() },
            ..Settings::default()
        };
        let good = of(listen, 1, Some(peer(&peer_token, None))).check_http().unwrap().unwrap();
        assert!(good.peer.unwrap().is(b"0123456789abcdef-of-agents"));
        let refused = |settings: Settings, text: &str| {
            let error = settings.check_http().err().unwrap();
            assert_eq!(error.code(), Code::Usage, "{error}");
            assert!(error.render().contains(text), "{}", error.render());
        };
        refused(of(listen, 1, None), "peer_token_file");
        refused(of(None, 1, Some(peer(&peer_token, None))), "agent.listen");
        refused(of(listen, 1, Some(peer(&token, None))), "are the same");
        for url in ["http://node-7:9464", "node-7", "https://node-7/x", "https://a:b@node-7"] {
            refused(of(listen, 0, Some(peer(&peer_token, Some(url)))), "agent.peer_url");
        }
        of(listen, 0, Some(peer(&peer_token, Some("https://node-7:9464")))).check_http().unwrap();
        let no_ca = PeerSettings { ca_file: Some(token.clone()), ..peer(&peer_token, None) };
        refused(of(listen, 0, Some(no_ca)), "no certificates");
        let open = private(folder.path(), "open", "0123456789abcdef-of-agents");
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = of(listen, 0, Some(peer(&open, None))).check_http().err().unwrap();
        assert_eq!(error.code(), Code::PermissionDenied);
    }

    #[test]
    fn halves_and_doubles_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let token = private(folder.path(), "token", "0123456789abcdef0123456789abcdef");
        let listen = Some("127.0.0.1:1".parse().unwrap());
        let same = Settings {
            listen,
            token_file: Some(token.clone()),
            action_token_file: Some(token.clone()),
            ..Settings::default()
        };
        assert!(same.check_http().err().unwrap().what().contains("the same"));
        let half = Settings { listen, tls_key: Some(token.clone()), ..Settings::default() };
        assert!(half.check_http().err().unwrap().what().contains("belong together"));
        let bad = Settings {
            listen,
            tls_certificate: Some(token.clone()),
            tls_key: Some(token),
            ..Settings::default()
        };
        let error = bad.check_http().err().unwrap();
        assert!(!error.render().contains("0123456789abcdef"), "{}", error.render());
    }
}
