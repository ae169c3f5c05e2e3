//! The hash of a structure.

use forebay_tensor::Placement;
use sha2::{Digest, Sha256};

use super::structure::Structure;
use super::value::{Named, Value};
use crate::model::PathStep;

impl Structure {
    /// The structure hash: SHA-256 of a spelling of its own, which changes with no version of the manifest.
    ///
    /// ```text
    /// "forebay structure 1\n"
    /// number of meshes;  each: number of sides, sides, 0 where ranks are 0, 1, 2, ..., else 1 and all ranks
    /// number of layouts; each: mesh, 1 where it is read from right to left, else 0, number of placements, each as
    ///                    three numbers: 0 0 0 replicate, 1 dim 0 shard, 2 dim split strided shard
    /// number of values;  each: text name, number of steps, each step 0 and text key or 1 and place in the list,
    ///                    then 0, text dtype, requires_grad (0 or 1), layout + 1 (0: none), number of sides, sides
    ///                    or   1 (an object)
    ///                    or   2, text of the other name (an alias)
    /// ```
    ///
    /// All numbers are `u64`, little-endian; a text is its length in bytes and its bytes. Everything in canonical
    /// order.
    pub fn hash(&self) -> [u8; 32] {
        let mut out = Hashed(Sha256::new());
        out.0.update(b"forebay structure 1\n");
        out.number(self.meshes.len() as u64);
        for mesh in &self.meshes {
            out.numbers(mesh.shape().iter().copied());
            let ranks = (0..mesh.size()).map(|index| mesh.rank(index).unwrap_or(index));
            let plain = ranks.clone().eq(0..mesh.size());
            out.number(u64::from(!plain));
            if !plain {
                ranks.for_each(|rank| out.number(u64::from(rank)));
            }
        }
        out.number(self.layouts.len() as u64);
        for layout in &self.layouts {
            out.number(u64::from(layout.mesh));
            out.number(u64::from(layout.right_to_left));
            out.number(layout.placements.len() as u64);
            for &placement in &layout.placements {
                out.placement(placement);
            }
        }
        out.number(self.values.len() as u64);
        for named in &self.values {
            out.value(named);
        }
        out.0.finalize().into()
    }
}

struct Hashed(Sha256);

impl Hashed {
    fn number(&mut self, value: u64) {
        self.0.update(value.to_le_bytes());
    }

    fn numbers(&mut self, values: impl ExactSizeIterator<Item = u64>) {
        self.number(values.len() as u64);
        values.for_each(|value| self.number(value));
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    fn placement(&mut self, placement: Placement) {
        let three = match placement {
            // Partial sums are in no layout.
            Placement::Replicate | Placement::Partial => [0, 0, 0],
            Placement::Shard(dim) => [1, dim as u64, 0],
            Placement::StridedShard { dim, split_factor } => [2, dim as u64, split_factor],
        };
        three.into_iter().for_each(|value| self.number(value));
    }

    fn value(&mut self, named: &Named) {
        self.text(&named.name);
        self.number(named.path.len() as u64);
        for step in &named.path {
            match step {
                PathStep::Key(key) => {
                    self.number(0);
                    self.text(key);
                }
                PathStep::Index(index) => {
                    self.number(1);
                    self.number(*index);
                }
            }
        }
        match &named.value {
            Value::Tensor(tensor) => {
                self.number(0);
                self.text(tensor.dtype.name());
                self.number(u64::from(tensor.requires_grad));
                self.number(tensor.layout.map_or(0, |layout| u64::from(layout) + 1));
                self.numbers(tensor.shape.iter().copied());
            }
            Value::Object => self.number(1),
            Value::Alias { of } => {
                self.number(2);
                self.text(of);
            }
        }
    }
}
