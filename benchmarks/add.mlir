func.func @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {
  %sum = arith.addf %a, %b : tensor<4xf32>
  return %sum : tensor<4xf32>
}
