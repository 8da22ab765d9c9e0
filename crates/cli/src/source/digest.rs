//! SHA-256 of a stream, as the lower-case hexadecimal text that every source publishes.

use std::io::{self, Read};

use sha2::{Digest, Sha256};

/// A running SHA-256.
#[derive(Default, Clone)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Adds all that `reader` still holds; returns how many bytes that was.
    pub fn update_from(&mut self, reader: &mut impl Read) -> io::Result<u64> {
        let mut buffer = vec![0; super::CHUNK_BYTES];
        let mut bytes = 0;
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(bytes),
                Ok(n) => {
                    self.update(&buffer[..n]);
                    bytes += n as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The digest, 64 lower-case hexadecimal digits.
    pub fn hex(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The digest in `text`, if it is one: 64 hexadecimal digits, returned in lower case.
pub fn parse_sha256(text: &str) -> Option<String> {
    (text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())).then(|| text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_digest() {
        // FIPS 180-2, appendix B.1.
        let mut hasher = Hasher::default();
        assert_eq!(hasher.update_from(&mut &b"abc"[..]).unwrap(), 3);
        let hex = hasher.hex();
        assert_eq!(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(parse_sha256(&hex.to_ascii_uppercase()), Some(hex));
        assert_eq!(parse_sha256("ba7816bf"), None);
    }
}
