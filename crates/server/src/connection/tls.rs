//! TLS: a certificate with its key, which can be replaced while the server runs.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{ServerConfig, crypto::ring, version};
use tokio_rustls::{Accept, TlsAcceptor};

/// A TLS certificate and its private key. Clones share them.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
    certificate: Arc<CurrentCertificate>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// A PEM file that was read.
#[derive(Clone, Copy)]
pub struct PemFile<'a> {
    /// Name of the file, for errors.
    pub name: &'a str,
    /// Content of the file.
    pub content: &'a [u8],
}

impl fmt::Debug for PemFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the content, which may be a private key.
        write!(f, "PemFile({:?})", self.name)
    }
}

/// Why a certificate or a key cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The certificate file is not PEM, or holds no certificate.
    #[error("{file}: expected a certificate in PEM format, found no certificate")]
    NoCertificate {
        /// Name of the certificate file.
        file: String,
    },
    /// The key file is not PEM, or holds no private key.
    #[error("{file}: expected a private key in PEM format, found no private key")]
    NoKey {
        /// Name of the key file.
        file: String,
    },
    /// The TLS library refuses the pair, for the reason given.
    #[error("the certificate {certificate} cannot be used with the key {key}: {reason}")]
    Refused {
        /// Name of the certificate file.
        certificate: String,
        /// Name of the key file.
        key: String,
        /// The library's reason.
        reason: String,
    },
}

/// The certificate that the next handshake presents.
#[derive(Debug)]
struct CurrentCertificate(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

impl Tls {
    /// Builds the configuration from two PEM files.
    pub fn from_pem(certificate: PemFile<'_>, key: PemFile<'_>) -> Result<Tls, TlsError> {
        let current = Arc::new(CurrentCertificate(RwLock::new(Arc::new(certified_key(certificate, key)?))));
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&version::TLS13, &version::TLS12])
            .map_err(|error| refused(certificate, key, &error.to_string()))?
            .with_no_client_auth()
            .with_cert_resolver(current.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls { acceptor: TlsAcceptor::from(Arc::new(config)), certificate: current })
    }

    /// Presents another certificate from the next handshake on; open connections go on with theirs. If the files are
    /// refused, nothing changes.
    pub fn replace(&self, certificate: PemFile<'_>, key: PemFile<'_>) -> Result<(), TlsError> {
        let new = Arc::new(certified_key(certificate, key)?);
        *self.certificate.0.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    pub(crate) fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> Accept<S> {
        self.acceptor.accept(stream)
    }
}

fn certified_key(certificate: PemFile<'_>, key: PemFile<'_>) -> Result<CertifiedKey, TlsError> {
    let no_certificate = || TlsError::NoCertificate { file: certificate.name.to_owned() };
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_slice_iter(certificate.content).collect::<Result<_, _>>().map_err(|_| no_certificate())?;
    if chain.is_empty() {
        return Err(no_certificate());
    }
    let private =
        PrivateKeyDer::from_pem_slice(key.content).map_err(|_| TlsError::NoKey { file: key.name.to_owned() })?;
    // Also checks that the key belongs to the certificate.
    CertifiedKey::from_der(chain, private, &ring::default_provider())
        .map_err(|error| refused(certificate, key, &error.to_string()))
}

fn refused(certificate: PemFile<'_>, key: PemFile<'_>, reason: &str) -> TlsError {
    let [certificate, key] = [certificate.name, key.name].map(str::to_owned);
    TlsError::Refused { certificate, key, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls_pki_types::{ServerName, UnixTime};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

    // Self-signed, each with its key.
    const FIRST: PemFile<'static> =
        PemFile { name: "first.pem", content: include_bytes!("../../tests/certificates/first.pem") };
    const SECOND: PemFile<'static> =
        PemFile { name: "second.pem", content: include_bytes!("../../tests/certificates/second.pem") };

    /// Accepts every certificate.
    #[derive(Debug)]
    struct AcceptAll;

    impl ServerCertVerifier for AcceptAll {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ECDSA_NISTP256_SHA256]
        }
    }

    /// Returns the certificate that a client sees.
    fn presented(tls: &Tls) -> Vec<u8> {
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAll))
            .with_no_client_auth();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (near, far) = tokio::io::duplex(1 << 16);
            let name = ServerName::try_from("test.example").unwrap();
            let connector = TlsConnector::from(Arc::new(config));
            let (client, _server) = tokio::join!(connector.connect(name, near), tls.accept(far));
            client.unwrap().get_ref().1.peer_certificates().unwrap()[0].to_vec()
        })
    }

    #[test]
    fn the_next_handshake_presents_the_new_certificate() {
        let tls = Tls::from_pem(FIRST, FIRST).unwrap();
        let first = presented(&tls);
        assert_eq!(presented(&tls), first);
        // A pair that does not fit changes nothing.
        assert!(matches!(tls.replace(SECOND, FIRST), Err(TlsError::Refused { .. })));
        assert_eq!(presented(&tls), first);
        tls.replace(SECOND, SECOND).unwrap();
        assert_ne!(presented(&tls), first);
    }

    #[test]
    fn errors_name_the_file() {
        let empty = PemFile { name: "empty.pem", content: b"nothing" };
        let error = |certificate, key| Tls::from_pem(certificate, key).map(drop).unwrap_err().to_string();
        assert_eq!(error(empty, FIRST), "empty.pem: expected a certificate in PEM format, found no certificate");
        assert_eq!(error(FIRST, empty), "empty.pem: expected a private key in PEM format, found no private key");
        let mixed = error(FIRST, SECOND);
        assert!(mixed.starts_with("the certificate first.pem cannot be used with the key second.pem: "), "{mixed}");
    }
}
